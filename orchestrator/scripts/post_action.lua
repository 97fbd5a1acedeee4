-- Puts an action into an episode's mailbox; the same action under the same number again changes nothing.
-- KEYS: 1 episode row, 2 actions, 3 results, 4 inbox
-- ARGV: 1 number, 2 action JSON, 3 life seconds
-- Returns: {'posted'}, {'known'}, {'done', result JSON} when its result is there, {'closed'} when the episode has ended,
--          {'other'} when another action has that number: somebody else drives this episode too
local known = redis.call('HGET', KEYS[2], ARGV[1])
if known and known ~= ARGV[2] then return {'other'} end
local result = redis.call('HGET', KEYS[3], ARGV[1])
if result then return {'done', result} end
if known then return {'known'} end
if redis.call('HGET', KEYS[1], 'state') == 'final' or redis.call('EXISTS', KEYS[1]) == 0 then return {'closed'} end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('RPUSH', KEYS[4], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[3])
redis.call('EXPIRE', KEYS[4], ARGV[3])
return {'posted'}
