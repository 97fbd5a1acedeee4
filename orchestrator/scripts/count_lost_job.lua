-- Counts that a queued episode's job vanished before its lease was taken. Asked again, it counts nothing more.
-- KEYS: 1 episode row
-- ARGV: 1 how many of its losses were counted before this one
-- Returns: how many have been by now
local counted = tonumber(redis.call('HGET', KEYS[1], 'lost_jobs') or '0')
if counted ~= tonumber(ARGV[1]) or redis.call('EXISTS', KEYS[1]) == 0 then return counted end
return redis.call('HINCRBY', KEYS[1], 'lost_jobs', 1)
