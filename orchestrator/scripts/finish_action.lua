-- Stores an action's result under its number and wakes whoever waits; the first result stays.
-- KEYS: 1 episode row, 2 results, 3 outbox
-- ARGV: 1 number, 2 token, 3 result JSON, 4 life seconds, 5 life seconds of an ended episode's
-- Returns: 1 stored, 2 a result was there, 0 the token is not the owner's
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
if redis.call('HSETNX', KEYS[2], ARGV[1], ARGV[3]) == 0 then return 2 end
redis.call('RPUSH', KEYS[3], ARGV[1] .. ':' .. ARGV[3])
local life = redis.call('HGET', KEYS[1], 'state') == 'final' and ARGV[5] or ARGV[4]
redis.call('EXPIRE', KEYS[2], life)
redis.call('EXPIRE', KEYS[3], life)
return 1
