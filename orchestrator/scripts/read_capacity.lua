-- Reads how many episodes could be admitted now.
-- KEYS: 1 permits, 2 limits, 3 reservations, 4 slots
-- ARGV: 1 default concurrency limit
-- Returns: {live slots, concurrency limit, permits held, reserved}
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local reserved = 0
for _, row in ipairs(redis.call('HVALS', KEYS[3])) do
  local left, ends = string.match(row, '^(%d+):(%d+):(%d+)$')
  if tonumber(ends) > now then reserved = reserved + tonumber(left) end
end
return {redis.call('ZCOUNT', KEYS[4], now, '+inf'), tonumber(redis.call('HGET', KEYS[2], 'concurrency') or ARGV[1]),
        redis.call('ZCARD', KEYS[1]), reserved}
