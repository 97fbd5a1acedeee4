-- A slot takes a queued episode, if this job is still the one that its row names.
-- Needs: token. Needs: leases.
-- KEYS: 1 episode row, 2 leases, 3 token counter, 4 farm tag
-- ARGV: 1 episode id, 2 job id, 3 owner (unique to this run of this job: asking again returns the same lease), 4 lease ms,
--       5 the farm's tag if it has none yet
-- Returns: {token, queued_at ms, taken at ms, farm tag, 1 if its end was asked for already else 0},
--          or {0, state} when the row is not there, not queued, or another job's
local function lease(token, taken)
  redis.call('SET', KEYS[4], ARGV[5], 'NX')
  return {token, redis.call('HGET', KEYS[1], 'queued_at'), taken, redis.call('GET', KEYS[4]),
          redis.call('HEXISTS', KEYS[1], 'cancel')}
end
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'running' and redis.call('HGET', KEYS[1], 'owner') == ARGV[3] then
  return lease(tonumber(redis.call('HGET', KEYS[1], 'token')), redis.call('HGET', KEYS[1], 'started_at'))
end
if state ~= 'queued' or redis.call('HGET', KEYS[1], 'job') ~= ARGV[2] then return {0, state or 'missing'} end
local now = now_ms()
local token = next_token(KEYS[3])
redis.call('HSET', KEYS[1], 'state', 'running', 'token', token, 'owner', ARGV[3], 'started_at', now)
give_lease(KEYS[2], KEYS[1], ARGV[1], ARGV[4], now)
return lease(token, now)
