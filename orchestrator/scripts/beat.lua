-- Says that a worker and its slots are alive for a while longer; drops its other slots, and all that have not said so.
-- Needs: clock.
-- KEYS: 1 the zset of the living slots, 2 the zset of the living workers
-- ARGV: 1 a slot's life ms, 2 a worker's life ms, 3 this worker's id (its slots are called ID-N), 4.. its live slots
-- Returns: how many slots are alive
local now = now_ms()
local prefix = ARGV[3] .. '-'
for _, slot in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if string.match(string.sub(slot, #prefix + 1), '^%d+$') and string.sub(slot, 1, #prefix) == prefix then
    redis.call('ZREM', KEYS[1], slot)
  end
end
for i = 4, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[3])
for i = 1, 2 do
  redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now)
  pull_back(KEYS[i], now + ARGV[i], now + ARGV[i])
end
return redis.call('ZCARD', KEYS[1])
