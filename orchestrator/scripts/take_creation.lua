-- Books the next place in the shared creation bucket (burst 1): first come, first served over all processes.
-- KEYS: 1 limits
-- ARGV: 1 default rate (creations a second; 0 = no limit of ours), 2 longest wait ms: a later place is not booked
-- Returns: ms to wait before creating
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local cooldown = math.max(0, tonumber(redis.call('HGET', KEYS[1], 'cooldown_until') or '0') - now)
local rate = tonumber(redis.call('HGET', KEYS[1], 'rate') or ARGV[1])
if rate <= 0 then return cooldown end
local at = math.max(now + cooldown, tonumber(redis.call('HGET', KEYS[1], 'next_creation') or '0'))
if at - now <= tonumber(ARGV[2]) then redis.call('HSET', KEYS[1], 'next_creation', at + math.ceil(1000 / rate)) end
return at - now
