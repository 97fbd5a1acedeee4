-- Drops the slots that have not said lately that they are alive. Needs: clock.
-- KEYS: 1 the zset of the living
-- ARGV: 1 life ms
-- Returns: how many there were
local now = now_ms()
pull_back(KEYS[1], now + ARGV[1], now + ARGV[1])
return redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
