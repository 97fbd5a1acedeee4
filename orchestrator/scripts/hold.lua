-- Takes or keeps what one holder has at a time: the lead of the reconcilers, a run that one trainer drives.
-- KEYS: 1 holder
-- ARGV: 1 name, 2 life ms
-- Returns: 1 held, 0 it is another's
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
