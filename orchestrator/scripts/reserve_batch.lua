-- Reserves capacity for a whole batch, all or nothing, first come, first served: not what episodes before it in line
-- need, nor while another batch that the limit bears is before it. One that waits keeps its place as long as it asks again.
-- A limit that a 429 lowered is raised for a batch now and then, as it is for those who create.
-- Needs: limits.
-- KEYS: 1 permits, 2 limits, 3 reservations, 4 slots, 5 waiters, 6 when they asked last, 7 batches in line,
--       8 who stepped back, 9 wake list of this batch
-- ARGV: 1 default concurrency limit, 2 reservation id, 3 wanted, 4 life ms, 5 whether it waits in line (1 or 0),
--       6 its name in line, 7 wake key prefix, 8 how long who stepped back is believed to come again, ms,
--       9 queue of its jobs, 10 worker key prefix, 11 episode key prefix
-- Returns: {1 reserved or 0 not, live slots that take its jobs, configured concurrency limit}
local now = now_ms()
local rows, reserved = read_reservations(KEYS[3], now)
local here, others = places_of_queue(ARGV[9], KEYS[4], KEYS[1], ARGV[10], ARGV[11], now)
local limits = read_hash(KEYS[2])
local limit, configured = allowed_concurrency(limits, ARGV[1])
local wanted = tonumber(ARGV[3])
local possible = math.min(here, configured)
if rows[ARGV[2]] then return {1, here, configured} end  -- asked again, since the answer was lost

drop_silent(KEYS[6], now, KEYS[5], KEYS[7])
pull_back(KEYS[8], now, now)
redis.call('ZREMRANGEBYSCORE', KEYS[8], '-inf', now - ARGV[8])  -- an episode that ended left it by itself
redis.call('DEL', KEYS[9])
local place = tonumber(redis.call('ZSCORE', KEYS[7], ARGV[6]) or last_place(now, KEYS[5], KEYS[7], KEYS[8]))
local before = '(' .. string.format('%.0f', place)
local theirs = first_batch(KEYS[7], limit)
local first = not theirs or tonumber(theirs) >= place
local needed = redis.call('ZCARD', KEYS[1]) + reserved + wanted
  + redis.call('ZCOUNT', KEYS[5], '-inf', before) + redis.call('ZCOUNT', KEYS[8], '-inf', before)
if first and limit < needed and needed <= possible then
  -- who only reserves never comes to the creation whose turn it would be to try one more
  limit = probe_concurrency(KEYS[2], limits, ARGV[1], now, needed)
end
local fits = first and math.min(here + others, limit) >= needed
if fits then
  local ends = string.format('%.0f', now + ARGV[4])
  write_reservation(KEYS[3], ARGV[2], {left = wanted, ends = ends, total = wanted, life = ARGV[4]})
end
if not fits and ARGV[5] == '1' and possible >= wanted then
  redis.call('ZADD', KEYS[7], place, ARGV[6])
  redis.call('ZADD', KEYS[6], now, ARGV[6])
elseif redis.call('ZREM', KEYS[7], ARGV[6]) == 1 then
  redis.call('ZREM', KEYS[6], ARGV[6])
  wake_line(KEYS[5], KEYS[7], ARGV[7])  -- their turn, or they have to leave their slots to it
end
return {fits and 1 or 0, here, configured}
