-- Writes an episode's one receipt with the counters that metrics read, ends its row and its lease, tells who waits.
-- Needs: limits. Needs: costs. Needs: money. Needs: lives.
-- KEYS: 1 episode row, 2 open, 3 leases, 4 receipt, 5 receipts, 6 finished stream, 7 counters, 8 permits, 9 waiters,
--       10 waiters seen, 11 places at the provider, 12 limits, 13 line of creators, 14 when they ask again,
--       15 the farm's budget, 16 batches in line for permits, 17 who stepped back from that line,
--       18 when receipts end, 19 when those of the run do, 20 transcript, 21 its last attempt,
--       22 and after: the parts of its mailbox
-- ARGV: 1 episode id, 2 token, 3 receipt JSON, 4 outcome, 5 scored (1 or 0), 6 retention seconds, 7 wake key prefix,
--       8 counters JSON, 9 bounds of an episode's cost, JSON, 10 prefix of a run's budget,
--       11 allocation key prefix, 12 life seconds of an ended episode's mailbox
-- Returns: 1 written (also when this very text was written before), 0 not the owner's token or another receipt stands,
--          -1 a score was asked for while an allocation is unsettled
local standing = redis.call('GET', KEYS[4])
if standing then return standing == ARGV[3] and 1 or 0 end
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] or redis.call('HGET', KEYS[1], 'state') == 'final' then return 0 end
local unsettled = tonumber(redis.call('HGET', KEYS[1], 'unsettled'))
if ARGV[5] == '1' and unsettled > 0 then return -1 end
local now = now_ms()
local life = ARGV[6] * 1000
redis.call('SET', KEYS[4], ARGV[3], 'EX', ARGV[6])
redis.call('ZADD', KEYS[5], now, ARGV[1])
redis.call('ZADD', KEYS[18], now + life, ARGV[1])
trim_index(KEYS[5], KEYS[18], now)
-- who settled its sandboxes may keep things for a shorter time than who writes the receipt that names them
outlive(KEYS[20], life)
local kept = life
for name in string.gmatch(redis.call('HGET', KEYS[1], 'allocations'), '[^,]+') do
  local left = redis.call('PTTL', ARGV[11] .. name)
  if left >= 0 then outlive(ARGV[11] .. name, life) end
  kept = math.max(kept, left)
end
remember_attempt(KEYS[21], KEYS[1], kept)
redis.call('HSET', KEYS[1], 'state', 'final', 'outcome', ARGV[4], 'finished_at', now)
for part = 22, #KEYS do redis.call('EXPIRE', KEYS[part], ARGV[12]) end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
local entry = redis.call('XADD', KEYS[6], '*', 'episode', ARGV[1])
redis.call('ZADD', KEYS[19], now + life, entry)
redis.call('HSET', KEYS[1], 'entry', entry)  -- an id that was run again may stand there from before
trim_stream(KEYS[6], KEYS[19], now)
outlive(KEYS[6], life)
outlive(KEYS[19], life)
redis.call('HINCRBY', KEYS[7], 'episodes:' .. ARGV[4], 1)
for name, value in pairs(cjson.decode(ARGV[8])) do redis.call('HINCRBY', KEYS[7], name, value) end
local moved = redis.call('ZREM', KEYS[9], ARGV[1])  -- a waiter that died may have had the wake
redis.call('ZREM', KEYS[10], ARGV[1])
moved = moved + redis.call('ZREM', KEYS[17], ARGV[1])
if unsettled <= 0 then
  observe_cost(KEYS[1], KEYS[7], ARGV[9])
  outlive(KEYS[1], life)
  release_money(KEYS[1], KEYS[15], ARGV[10])
  moved = moved + free_permit(ARGV[1], KEYS[8], KEYS[11], KEYS[12], KEYS[13], KEYS[14], ARGV[7])
end
if moved > 0 then wake_line(KEYS[9], KEYS[16], ARGV[7]) end
return 1
