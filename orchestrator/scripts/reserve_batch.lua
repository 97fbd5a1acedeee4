-- Reserves capacity for a whole batch, all or nothing. The first batch that has to wait keeps its turn: until it has
-- its places (or stops asking for two seconds) no other batch and no episode without reservation takes them.
-- A limit that a 429 lowered is raised for a batch now and then, as it is for those who create.
-- Needs: limits.
-- KEYS: 1 permits, 2 limits, 3 reservations, 4 slots, 5 whose turn it is to reserve
-- ARGV: 1 default concurrency limit, 2 reservation id, 3 wanted, 4 life ms, 5 whether it will ask again (1 or 0)
-- Returns: {1 reserved or 0 not, live slots, configured concurrency limit, permits held, reserved by others}
local now = now_ms()
local rows, reserved = read_reservations(KEYS[3], now)
if rows[ARGV[2]] then reserved = reserved - rows[ARGV[2]].left end
local slots = redis.call('ZCOUNT', KEYS[4], now, '+inf')
local limits = read_hash(KEYS[2])
local limit, configured = allowed_concurrency(limits, ARGV[1])
local held = redis.call('ZCARD', KEYS[1])
local wanted = tonumber(ARGV[3])
local turn = read_turn(KEYS[5])
local ours = not turn or turn == ARGV[2]
local needed = held + reserved + wanted
if ours and limit < needed and needed <= math.min(slots, configured) then
  -- who only reserves never comes to the creation whose turn it would be to try one more
  limit = probe_concurrency(KEYS[2], limits, ARGV[1], now, needed)
end
local fits = ours and math.min(slots, limit) >= needed
if fits then
  local ends = string.format('%.0f', now + ARGV[4])
  write_reservation(KEYS[3], ARGV[2], {left = wanted, ends = ends, total = wanted, life = ARGV[4]})
  if turn then redis.call('DEL', KEYS[5]) end
elseif ours and ARGV[5] == '1' and math.min(slots, configured) >= wanted then
  redis.call('SET', KEYS[5], ARGV[2], 'PX', TURN_MS)
end
return {fits and 1 or 0, slots, configured, held, reserved}
