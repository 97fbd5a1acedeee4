-- Reads who holds what one holder has at a time, and how much longer.
-- Needs: clock. Needs: held.
-- KEYS: 1 holder
-- Returns: {name or '', ms left}
local held = redis.call('GET', KEYS[1])
if not held then return {'', 0} end
local name, life = read_held(held)
pull_back_key(KEYS[1], life)
return {name, math.max(0, redis.call('PTTL', KEYS[1]))}
