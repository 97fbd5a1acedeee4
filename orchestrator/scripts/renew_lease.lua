-- Prolongs a lease, if the token still owns the episode.
-- Needs: leases.
-- KEYS: 1 episode row, 2 leases
-- ARGV: 1 episode id, 2 token, 3 lease ms
-- Returns: 1 renewed, 0 lost
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] or redis.call('HGET', KEYS[1], 'state') ~= 'running' then
  return 0
end
give_lease(KEYS[2], KEYS[1], ARGV[1], ARGV[3], now_ms())
return 1
