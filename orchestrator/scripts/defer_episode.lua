-- A slot gives a leased episode back to the queue under its next job, having allocated nothing for it. It has left the
-- line for a permit before (limiter.py, `admit`).
-- KEYS: 1 episode row, 2 leases
-- ARGV: 1 episode id, 2 token, 3 next job id
-- Returns: 1 given back (also when it was before), 0 the token is not the owner's or something was allocated
if redis.call('HGET', KEYS[1], 'state') == 'queued' and redis.call('HGET', KEYS[1], 'job') == ARGV[3] then return 1 end
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] or redis.call('HGET', KEYS[1], 'state') ~= 'running' then
  return 0
end
if redis.call('HGET', KEYS[1], 'allocations') ~= '' then return 0 end
redis.call('HSET', KEYS[1], 'state', 'queued', 'job', ARGV[3], 'left_at', now_ms())
redis.call('HINCRBY', KEYS[1], 'attempt', 1)
redis.call('HDEL', KEYS[1], 'token', 'owner', 'started_at', 'lease_ms')
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
