-- Reads how many episodes could be admitted now. Needs: limits.
-- KEYS: 1 permits, 2 limits, 3 reservations, 4 slots
-- ARGV: 1 default concurrency limit
-- Returns: {live slots, concurrency limit in force, permits held, reserved}
local now = now_ms()
local reserved = 0
for _, row in ipairs(redis.call('HVALS', KEYS[3])) do
  local left, ends = string.match(row, '^(%d+):(%d+):(%d+)$')
  if tonumber(ends) > now then reserved = reserved + tonumber(left) end
end
return {redis.call('ZCOUNT', KEYS[4], now, '+inf'), (allowed_concurrency(read_hash(KEYS[2]), ARGV[1])),
        redis.call('ZCARD', KEYS[1]), reserved}
