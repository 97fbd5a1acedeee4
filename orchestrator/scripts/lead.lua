-- Takes or keeps the leadership of the reconcilers.
-- KEYS: 1 leader
-- ARGV: 1 name, 2 life ms
-- Returns: 1 leading, 0 somebody else leads
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
