-- Gives back what is left of a reservation, and wakes whoever is first in line for it. Needs: limits.
-- KEYS: 1 reservations, 2 waiters, 3 batches in line
-- ARGV: 1 reservation id, 2 wake key prefix
-- Returns: 1 given back, 0 nothing was left of it
local gone = redis.call('HDEL', KEYS[1], ARGV[1])
wake_line(KEYS[2], KEYS[3], ARGV[2])
return gone
