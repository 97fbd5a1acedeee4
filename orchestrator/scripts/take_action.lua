-- Takes an action before it is executed: once, by the episode's owner only. What is two numbers older is forgotten: who
-- asked for the one between has read its result, or will not.
-- KEYS: 1 episode row, 2 actions, 3 taken, 4 results
-- ARGV: 1 number, 2 token, 3 life seconds, 4 a nonce of this very call (its repetition gets the same answer)
-- Returns: the action JSON, or false when it is not there, was taken before, or the token is not the owner's
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] or redis.call('HGET', KEYS[1], 'state') ~= 'running' then
  return false
end
local action = redis.call('HGET', KEYS[2], ARGV[1])
if not action then return false end
if redis.call('HSETNX', KEYS[3], ARGV[1], ARGV[4]) == 0 and redis.call('HGET', KEYS[3], ARGV[1]) ~= ARGV[4] then
  return false
end
redis.call('EXPIRE', KEYS[3], ARGV[3])
local read = ARGV[1] - 2
if read > 0 and redis.call('HDEL', KEYS[4], read) == 1 then
  redis.call('HSET', KEYS[2], read, '')  -- no action is empty: who posts it again is told that another has this number
end
return action
