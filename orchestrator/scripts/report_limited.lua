-- Remembers a 429: counts it by kind, and for the rate kind pauses every creation until the given time has passed.
-- KEYS: 1 limits, 2 counters
-- ARGV: 1 kind (rate or concurrency), 2 pause ms (0 for none)
-- Returns: ms until the shared cooldown ends
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('HINCRBY', KEYS[2], 'rate_limited:' .. ARGV[1], 1)
local ends = math.max(tonumber(redis.call('HGET', KEYS[1], 'cooldown_until') or '0'), now + ARGV[2])
redis.call('HSET', KEYS[1], 'cooldown_until', ends)
return math.max(0, ends - now)
