-- Reads how many episodes could be admitted now; drops reservations that are over. Needs: limits.
-- KEYS: 1 permits, 2 limits, 3 reservations, 4 slots
-- ARGV: 1 default concurrency limit
-- Returns: {live slots, concurrency limit in force, permits held, reserved}
local now = now_ms()
local _, reserved = read_reservations(KEYS[3], now)
return {redis.call('ZCOUNT', KEYS[4], now, '+inf'), (allowed_concurrency(read_hash(KEYS[2]), ARGV[1])),
        redis.call('ZCARD', KEYS[1]), reserved}
