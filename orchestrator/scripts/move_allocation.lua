-- Moves an allocation along one row of the transition table; settles it and frees its permit where that ends it.
-- Its reservation gives way to what it really cost. Of one that was never named nobody knows: it counts as its longest
-- life in the budgets, and not at all in the counters.
-- Needs: limits. Needs: costs. Needs: money. Needs: lives.
-- KEYS: 1 episode row, 2 allocation row, 3 allocations, 4 counters, 5 permits, 6 waiters,
--       7 places at the provider, 8 limits, 9 line of creators, 10 when they ask again, 11 the farm's budget,
--       12 batches in line for permits, 13 receipt, 14 its episode's last attempt
-- ARGV: 1 token, 2 allocation id, 3 episode id, 4 next state, 5 allowed from (comma-separated), 6 settled (1 or 0),
--       7 retention seconds where no receipt stands, 8 wake key prefix, 9 fields JSON, 10 counters JSON,
--       11 cost in pico-dollars, 12 bounds of an episode's cost, JSON, 13 prefix of a run's budget,
--       14 retention seconds of the allocation row
--       (the token '*' is the reconciler's for episodes that are over: with their receipt, or with no row any more)
-- Returns: 1 moved, 2 it was in that state already, 0 not the owner's token, -1 not a row of the table
local state = redis.call('HGET', KEYS[2], 'state')
if not state then return -1 end
if state == ARGV[4] and state ~= 'unknown' then return 2 end
local known = redis.call('EXISTS', KEYS[1]) == 1
local final = not known or redis.call('HGET', KEYS[1], 'state') == 'final'
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] and not (ARGV[1] == '*' and final) then return 0 end
local now = now_ms()
if state == ARGV[4] then  -- unknown again: one more creation may have been sent, the longest life counts from here
  redis.call('HSET', KEYS[2], 'unknown_at', now)
  return 2
end
if not string.find(',' .. ARGV[5] .. ',', ',' .. state .. ',', 1, true) then return -1 end
redis.call('HSET', KEYS[2], 'state', ARGV[4], ARGV[4] .. '_at', now)
local fields = cjson.decode(ARGV[9])
for name, value in pairs(fields) do redis.call('HSET', KEYS[2], name, value) end
for name, value in pairs(cjson.decode(ARGV[10])) do redis.call('HINCRBY', KEYS[4], name, value) end
if ARGV[11] ~= '0' and known then redis.call('HINCRBY', KEYS[1], 'cost_picousd', ARGV[11]) end
if ARGV[4] == 'absent' then redis.call('HSET', KEYS[8], 'freed_at', now) end
if ARGV[4] == 'created' or ARGV[6] == '1' then note_sandbox(KEYS[7], ARGV[3], KEYS[8], ARGV[4] == 'created', now) end
if ARGV[6] == '1' then
  redis.call('ZREM', KEYS[3], ARGV[2])
  local of_receipt = redis.call('PTTL', KEYS[13])  -- its writer may keep it for longer than we do
  local kept = math.max(ARGV[14] * 1000, of_receipt)
  outlive(KEYS[2], kept)
  local reservation = 'reserved_' .. redis.call('HGET', KEYS[2], 'role')
  local held = tonumber(redis.call('HGET', KEYS[1], reservation) or '0')
  local cost = tonumber(fields.cost_picousd or ARGV[4] == 'expired' and held or 0)
  redis.call('HDEL', KEYS[1], reservation)
  local run = redis.call('HGET', KEYS[1], 'run')
  if run and (held ~= 0 or cost ~= 0) then move_money(KEYS[11], ARGV[13] .. run, -held, cost) end
  local left = known and redis.call('HINCRBY', KEYS[1], 'unsettled', -1) or 0
  if final and left <= 0 then
    if known then
      remember_attempt(KEYS[14], KEYS[1], kept)
      observe_cost(KEYS[1], KEYS[4], ARGV[12])
      -- as its receipt, to the millisecond: whoever waits would wait for a receipt that is gone
      redis.call('PEXPIRE', KEYS[1], string.format('%.0f', of_receipt >= 0 and of_receipt or ARGV[7] * 1000))
      release_money(KEYS[1], KEYS[11], ARGV[13])
    end
    if free_permit(ARGV[3], KEYS[5], KEYS[7], KEYS[8], KEYS[9], KEYS[10], ARGV[8]) == 1 then
      wake_line(KEYS[6], KEYS[12], ARGV[8])
    end
  end
end
return 1
