-- Gives back what `hold` took, if it is still ours. Needs: held.
-- KEYS: 1 holder
-- ARGV: 1 name
-- Returns: 1 given back, 0 it was not ours
local held = redis.call('GET', KEYS[1])
if not held or read_held(held) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
