-- Grants an episode the leave to hold one running sandbox: first come, first served, batches that wait for their places
-- included; who has a place reserved draws it without waiting for them.
-- With the permit goes a reservation of the most that its sandboxes can cost, in its run's budget and the farm's.
-- On the way it raises a lowered limit that has stood long enough and wakes a creator for it, drops waiters and
-- reservations that are over, and notes since when the episode is short of money.
-- Needs: limits. Needs: money.
-- KEYS: 1 permits, 2 waiters, 3 waiters seen, 4 limits, 5 reservations, 6 slots, 7 wake list of this episode,
--       8 episode row, 9 batches in line, 10 places at the provider, 11 line of creators, 12 when they ask,
--       13 the farm's budget, 14 sizes of templates, 15 who stepped back
-- ARGV: 1 episode id, 2 reservation id or '', 3 default concurrency limit, 4 how long it may wait in all, ms, in line or
--       for money: from when it first had to, without the time that it was back in the queue, 5 wake key prefix,
--       6 prefix of a run's budget, 7 pico-dollars per vCPU-second, 8 the same per GiB-second,
--       9 vcpus:memory_mb of a template that was never seen
-- Returns: 1 granted, 0 wait (in line), 2 step back: its slot, or all the money, is reserved for others,
--          3 the reservation can no longer be met (the limit fell below it), 4 the episode has its receipt or is unknown,
--          5 its run's budget cannot pay for it, 6 the farm's cannot, 7 it has waited for as long as it may
-- a permit given after the receipt, or without a row, would never be freed: a process that was stopped for long may
-- still ask, and one that waited while Redis lost its data
local episode = redis.call('HMGET', KEYS[8], 'state', 'run', 'template', 'policy_seconds', 'verifier_seconds',
                           'unfunded_at', 'arrived_at', 'left_at', 'away_ms')
if not episode[1] or episode[1] == 'final' then return 4 end
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 1 end
local now = now_ms()
local arrived, away = tonumber(episode[7]), 0
if arrived then
  redis.call('ZREM', KEYS[15], ARGV[1])  -- it is here again
  if arrived > now then  -- the clock stepped back since
    arrived = now
    redis.call('HSET', KEYS[8], 'arrived_at', now, 'away_ms', 0)
  else
    away = tonumber(episode[9] or '0')
    if episode[8] then
      away = away + math.max(0, now - tonumber(episode[8]))
      redis.call('HSET', KEYS[8], 'away_ms', string.format('%.0f', away))
    end
  end
end
local unfunded = tonumber(episode[6] or '0')
if episode[8] then
  redis.call('HDEL', KEYS[8], 'left_at')
  if unfunded ~= 0 then  -- in the queue it kept no slot from others, and nobody asked whether its money was there
    unfunded = unfunded + math.max(0, now - tonumber(episode[8]))
    redis.call('HSET', KEYS[8], 'unfunded_at', string.format('%.0f', unfunded))
  end
end

local function overdue() return now - arrived - away > tonumber(ARGV[4]) end

local function step_back()
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('DEL', KEYS[7])
  if redis.call('ZREM', KEYS[2], ARGV[1]) == 1 then wake_line(KEYS[2], KEYS[9], ARGV[5]) end  -- they may have to as well
  return 2
end

-- money first: who cannot be paid for takes no place in line
local run, size, policy, verifier
if episode[4] then
  run = ARGV[6] .. episode[2]
  size = redis.call('HGET', KEYS[14], episode[3]) or ARGV[9]
  local vcpus, memory = string.match(size, '^(%d+):(%d+)$')
  local function highest(seconds)
    return highest_price(tonumber(seconds), tonumber(vcpus), tonumber(memory), tonumber(ARGV[7]), tonumber(ARGV[8]))
  end
  policy, verifier = highest(episode[4]), highest(episode[5])
  local short, code = shortage(run, policy + verifier), 5
  if short < 2 then
    local of_farm = shortage(KEYS[13], policy + verifier)
    if of_farm > short then short, code = of_farm, 6 end
  end
  if short == 2 then return code end
  if short == 1 then
    if ARGV[2] ~= '' then return code end  -- its batch is live at once or not at all: none of it gives money back
    if unfunded == 0 or unfunded > now then  -- for the first time, or the clock stepped back since
      unfunded = now
      redis.call('HSET', KEYS[8], 'unfunded_at', now)
    end
    return now - unfunded > tonumber(ARGV[4]) and code or step_back()
  end
  if episode[6] then redis.call('HDEL', KEYS[8], 'unfunded_at') end
end

local limits = read_hash(KEYS[4])
local limit = allowed_concurrency(limits, ARGV[3])
local held, waiting = redis.call('ZCARD', KEYS[1]), redis.call('ZCARD', KEYS[2])
local asking = waiting
if waiting == 0 or not redis.call('ZSCORE', KEYS[2], ARGV[1]) then asking = waiting + 1 end
local queue = waiting > 0 or redis.call('EXISTS', KEYS[9]) == 1
-- one is asked for too many, and nobody holds a permit without a place: whoever did would be the one to try
if limits.effective and held + asking > limit and redis.call('ZCARD', KEYS[10]) >= math.min(held, limit) then
  local raised = probe_concurrency(KEYS[4], limits, ARGV[3], now)
  if raised > limit then wake_creator(KEYS[11], KEYS[12], ARGV[5], now) end  -- who holds a permit already goes first
  limit = raised
end
local rows, reserved = read_reservations(KEYS[5], now)
local mine = rows[ARGV[2]]
local free = limit - held
if not mine and paused_until(limits, now) > now + HOLD_MS then free = 0 end
local function grant()
  redis.call('ZADD', KEYS[1], mine and -mine.total or now, ARGV[1])
  if run then
    redis.call('HSET', KEYS[8], 'reserved_policy', string.format('%.0f', policy),
               'reserved_verifier', string.format('%.0f', verifier), 'size', size,
               'rates', ARGV[7] .. ':' .. ARGV[8])
    for _, part in ipairs({policy, verifier}) do move_money(KEYS[13], run, part, 0) end  -- as they are given back
  end
  if not queue then return 1 end
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('DEL', KEYS[7])
  if free > 1 then wake_first(KEYS[2], ARGV[5]) end  -- two releases may have woken the same waiter: pass the second on
  return 1
end
if mine then
  if batch_is_over(mine.total, limit, KEYS[1], reserved) then return 3 end
  if free > 0 then
    mine.left = mine.left - 1
    write_reservation(KEYS[5], ARGV[2], mine)
    return grant()
  end
elseif not queue and reserved == 0 and free > 0 then
  return grant()
end

queue = true
drop_silent(KEYS[3], now, KEYS[2], KEYS[9])
if not arrived then
  arrived = last_place(now, KEYS[2], KEYS[9], KEYS[15])
  redis.call('HSET', KEYS[8], 'arrived_at', string.format('%.0f', arrived))
end
-- a reserved one waits for nobody before it: in front, so that it is woken
redis.call('ZADD', KEYS[2], 'NX', mine and 0 or arrived, ARGV[1])
redis.call('ZADD', KEYS[3], now, ARGV[1])
local place, rank = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1])), redis.call('ZRANK', KEYS[2], ARGV[1])
if not mine then
  -- it must not sit in a slot that a reserved batch needs: there it leaves its place in line, which keeps batches that
  -- came later from passing it until it, or another in its stead, has been served
  if reserved > 0 and redis.call('ZCOUNT', KEYS[6], now, '+inf') - held - reserved <= rank then
    if overdue() then return 7 end
    redis.call('ZADD', KEYS[15], arrived, ARGV[1])
    return step_back()
  end
  local theirs = first_batch(KEYS[9], limit)
  local before = theirs and tonumber(theirs) < place and '(' .. theirs
  local turns = before and redis.call('ZCOUNT', KEYS[2], '-inf', before) + redis.call('ZCOUNT', KEYS[15], '-inf', before)
  if free - reserved > rank and (not before or rank < turns) then
    local served = before and redis.call('ZRANGE', KEYS[15], 0, 0)[1]
    if served then redis.call('ZREM', KEYS[15], served) end
    return grant()
  end
  if free - reserved > 0 and rank > 0 then wake_first(KEYS[2], ARGV[5]) end
end
return overdue() and 7 or 0
