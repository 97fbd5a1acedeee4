-- Reads how many episodes could be admitted now; drops reservations that are over. Needs: limits.
-- KEYS: 1 permits, 2 limits, 3 reservations, 4 slots
-- ARGV: 1 default concurrency limit, 2 queue whose slots count, '' for all, 3 worker key prefix, 4 episode key prefix
-- Returns: {live slots of the queue, concurrency limit in force, permits held, reserved, permits of other queues}
local now = now_ms()
local _, reserved = read_reservations(KEYS[3], now)
local here, others = places_of_queue(ARGV[2], KEYS[4], KEYS[1], ARGV[3], ARGV[4], now)
return {here, (allowed_concurrency(read_hash(KEYS[2]), ARGV[1])), redis.call('ZCARD', KEYS[1]), reserved, others}
