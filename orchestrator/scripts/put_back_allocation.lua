-- Puts back an allocation's times that lie ahead: they were noted before the clock stepped back. Its longest life counts
-- from them. Needs: clock.
-- KEYS: 1 allocation row
-- Returns: 1 put back, 0 none lay ahead
local names, row = {'intended_at', 'created_at', 'unknown_at', 'unresolved_at'}, {}
for i, at in ipairs(redis.call('HMGET', KEYS[1], unpack(names))) do row[names[i]] = at or nil end
return put_back(KEYS[1], row, names, now_ms()) and 1 or 0
