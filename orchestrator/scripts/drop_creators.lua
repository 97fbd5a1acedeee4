-- Takes those out of the line of creators whose process is gone; the next is woken where it has come nearer. Who asks
-- does the same, but nobody may ever ask again. Needs: limits.
-- KEYS: 1 limits, 2 line, 3 when each in line asks again
-- ARGV: 1 wake key prefix
-- Returns: how many there were
local dropped = drop_dead(KEYS[2], KEYS[3], now_ms(), '')
if dropped > 0 then wake_next_creator(KEYS[1], KEYS[2], KEYS[3], ARGV[1]) end
return dropped
