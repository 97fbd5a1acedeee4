-- Writes an allocation before anything is sent to the provider.
-- KEYS: 1 episode row, 2 allocation row, 3 allocations
-- ARGV: 1 token, 2 allocation id, 3 episode id, 4 role, 5 create request JSON, 6 the longest it can live, ms
-- Returns: 1 written or there already, 0 the token is not the owner's, -1 a sandbox went by this id already
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] or redis.call('HGET', KEYS[1], 'state') ~= 'running' then
  return 0
end
local listed = redis.call('HGET', KEYS[1], 'allocations')
local state = redis.call('HGET', KEYS[2], 'state')
if state then  -- only what this life has written itself, and has not gone on with, is its own call said again
  return state == 'intended' and string.find(',' .. listed .. ',', ',' .. ARGV[2] .. ',', 1, true) and 1 or -1
end
local now = now_ms()
redis.call('HSET', KEYS[2], 'allocation', ARGV[2], 'episode', ARGV[3], 'role', ARGV[4], 'state', 'intended',
           'request', ARGV[5], 'intended_at', now, 'longest_ms', ARGV[6])
redis.call('ZADD', KEYS[3], now, ARGV[2])
redis.call('HINCRBY', KEYS[1], 'unsettled', 1)
redis.call('HSET', KEYS[1], 'allocations', listed == '' and ARGV[2] or (listed .. ',' .. ARGV[2]))
return 1
