-- Prolongs a lease, if the token still owns the episode.
-- KEYS: 1 episode row, 2 leases
-- ARGV: 1 episode id, 2 token, 3 lease ms
-- Returns: 1 renewed, 0 lost
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] or redis.call('HGET', KEYS[1], 'state') ~= 'running' then
  return 0
end
local t = redis.call('TIME')
redis.call('ZADD', KEYS[2], t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[3], ARGV[1])
return 1
