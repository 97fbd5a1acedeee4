-- Reserves capacity for a whole batch, all or nothing. The first batch that has to wait keeps its turn: until it has
-- its places (or stops asking for two seconds) no other batch and no episode without reservation takes them.
-- Needs: limits.
-- KEYS: 1 permits, 2 limits, 3 reservations, 4 slots, 5 whose turn it is to reserve
-- ARGV: 1 default concurrency limit, 2 reservation id, 3 wanted, 4 life ms, 5 whether it will ask again (1 or 0)
-- Returns: {1 reserved or 0 not, live slots, configured concurrency limit, permits held, reserved by others}
local now = now_ms()
local reserved = 0
local rows = redis.call('HGETALL', KEYS[3])
for i = 1, #rows, 2 do
  local left, ends = string.match(rows[i + 1], '^(%d+):(%d+):(%d+)$')
  if tonumber(ends) <= now or tonumber(left) == 0 then
    redis.call('HDEL', KEYS[3], rows[i])
  elseif rows[i] ~= ARGV[2] then
    reserved = reserved + tonumber(left)
  end
end
local slots = redis.call('ZCOUNT', KEYS[4], now, '+inf')
local limit, configured = allowed_concurrency(read_hash(KEYS[2]), ARGV[1])
local held = redis.call('ZCARD', KEYS[1])
local wanted = tonumber(ARGV[3])
local turn = redis.call('GET', KEYS[5])
local ours = not turn or turn == ARGV[2]
local fits = ours and math.min(slots, limit) - held - reserved >= wanted
if fits then
  redis.call('HSET', KEYS[3], ARGV[2], ARGV[3] .. ':' .. (now + ARGV[4]) .. ':' .. ARGV[3])
  if turn then redis.call('DEL', KEYS[5]) end
elseif ours and ARGV[5] == '1' and math.min(slots, configured) >= wanted then
  redis.call('SET', KEYS[5], ARGV[2], 'PX', 2000)
end
return {fits and 1 or 0, slots, configured, held, reserved}
