-- Strikes a deleted orphan off the list of what could not be settled, and counts it: once, since it was on the list.
-- KEYS: 1 unresolved, 2 counters
-- ARGV: 1 the orphan's field
-- Returns: 1 counted, 0 it was not on the list (any more)
local struck = redis.call('HDEL', KEYS[1], ARGV[1])
if struck == 1 then redis.call('HINCRBY', KEYS[2], 'orphans_deleted', 1) end
return struck
