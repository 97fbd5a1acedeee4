-- A lease: a score of farm:leases, the moment at which it ends, and beside it in the episode's row the life that it was
-- given. A script whose header says "Needs: leases" is sent with this before it.

local function give_lease(leases, row, episode, life, now)
  redis.call('HSET', row, 'lease_ms', life)
  redis.call('ZADD', leases, now + life, episode)
end
