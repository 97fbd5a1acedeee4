-- The reconciler takes a running episode whose lease has run out; the old token can write nothing from here on.
-- Needs: token. Needs: leases.
-- KEYS: 1 episode row, 2 leases, 3 token counter
-- ARGV: 1 episode id, 2 owner, 3 lease ms
-- Returns: token (the same when this owner asks again), or 0 when it is not running or another's lease still holds
if redis.call('HGET', KEYS[1], 'state') ~= 'running' then return 0 end
local now = now_ms()
local ends = redis.call('ZSCORE', KEYS[2], ARGV[1])
if ends and tonumber(ends) > now then
  if redis.call('HGET', KEYS[1], 'owner') == ARGV[2] then return tonumber(redis.call('HGET', KEYS[1], 'token')) end
  return 0
end
local token = next_token(KEYS[3])
redis.call('HSET', KEYS[1], 'token', token, 'owner', ARGV[2])
give_lease(KEYS[2], KEYS[1], ARGV[1], ARGV[3], now)
return token
