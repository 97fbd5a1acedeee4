-- Says that members are alive for a while longer, and drops those that have not said so.
-- KEYS: 1 the zset of the living
-- ARGV: 1 life ms, 2.. members
-- Returns: how many are alive
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return redis.call('ZCARD', KEYS[1])
