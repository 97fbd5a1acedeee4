-- Notes a sandbox's real size. A row that has expired meanwhile is not written anew: it would have no life of its own.
-- KEYS: 1 allocation row
-- ARGV: 1 vcpus, 2 memory MB
-- Returns: 1 noted, 0 there is no such row any more
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'vcpus', ARGV[1], 'memory_mb', ARGV[2])
return 1
