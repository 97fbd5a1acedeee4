-- Says that one worker's slots are alive for a while longer; drops its other slots, and all that have not said so.
-- Needs: clock.
-- KEYS: 1 the zset of the living
-- ARGV: 1 life ms, 2 what the names of this worker's slots begin with, 3.. its live slots
-- Returns: how many are alive
local now = now_ms()
for _, slot in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if string.match(string.sub(slot, #ARGV[2] + 1), '^%d+$') and string.sub(slot, 1, #ARGV[2]) == ARGV[2] then
    redis.call('ZREM', KEYS[1], slot)
  end
end
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
pull_back(KEYS[1], now + ARGV[1], now + ARGV[1])
return redis.call('ZCARD', KEYS[1])
