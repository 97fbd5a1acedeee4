-- Lets a reservation last for its whole life from now on: an episode of its batch is submitted. Needs: limits.
-- KEYS: 1 reservations
-- ARGV: 1 reservation id
-- Returns: how many of its places nobody has drawn; 0 when it is over, given back or drawn whole
local now = now_ms()
local rows = read_reservations(KEYS[1], now)
local mine = rows[ARGV[1]]
if not mine then return 0 end
if mine.life ~= '' then
  mine.ends = string.format('%.0f', now + mine.life)
  write_reservation(KEYS[1], ARGV[1], mine)
end
return mine.left
