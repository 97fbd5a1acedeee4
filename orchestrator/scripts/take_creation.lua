-- Lets one creation through, or says when to ask again. A line in order of class, then arrival: verifiers that hold
-- their place at the provider already, verifiers that lost it to a refusal, policies. On the way it drops
-- the dead from the line, raises a lowered limit that has stood long enough, and lets the coming back of a lowered rate
-- stand still for as long as nobody created. Needs: limits.
-- KEYS: 1 limits, 2 line, 3 when each in line asks again, 4 places at the provider, 5 counters, 6 episode row,
--       7 this creation's leave, 8 its wake list, 9 permits
-- ARGV: 1 creation id, 2 episode id, 3 class (0 settles a creation of an episode that may be over, 1 verifier,
--       2 policy), 4 arrival number ('' at first), 5 default rate,
--       6 default concurrency limit, 7 longest wait ms (a turn beyond it is not waited for), 8 longest sleep ms,
--       9 wake key prefix
-- Returns: {1 granted (also when it was before), arrival}, {0 wait, arrival, ms until it should ask again},
--          {2 its turn is too far away, arrival, ms}, {3 the episode has its receipt already, or is unknown, ''},
--          {4 never: the limit fell below its batch, whose others wait for it and free no place, arrival}
if redis.call('EXISTS', KEYS[7]) == 1 then return {1, ARGV[4]} end
local state = redis.call('HGET', KEYS[6], 'state')
if ARGV[3] ~= '0' and (not state or state == 'final') then return {3, ''} end
-- all of it was settled meanwhile, and its place given back: nobody would give back another
if state == 'final' and tonumber(redis.call('HGET', KEYS[6], 'unsettled') or '1') <= 0 then return {3, ''} end
local now = now_ms()
local limits = read_hash(KEYS[1])
local rate = allowed_rate(limits, ARGV[5], now)
local interval = rate > 0 and 1000 / rate or 0
local possible_at = paused_until(limits, now)
if rate > 0 then
  -- a rate that has risen meanwhile asks for less than was booked
  possible_at = math.max(possible_at, math.min(tonumber(limits.next_creation or '0'), now + interval))
end

local arrival = tonumber(ARGV[4]) or redis.call('HINCRBY', KEYS[1], 'arrivals', 1)
local placed = redis.call('ZSCORE', KEYS[4], ARGV[2])
local class = placed and ARGV[3] == '1' and 0 or tonumber(ARGV[3])
local score = class * CLASS + arrival
local function count_ahead() return redis.call('ZCOUNT', KEYS[2], '-inf', '(' .. string.format('%.0f', score)) end
local ahead = count_ahead()
if ahead > 0 and drop_dead(KEYS[2], KEYS[3], now, ARGV[1]) > 0 then ahead = count_ahead() end
if ahead > 0 then
  for _, late in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - GRACE_MS)) do
    local theirs = tonumber(redis.call('ZSCORE', KEYS[2], late) or score)
    if late ~= ARGV[1] and theirs < score then ahead = ahead - 1 end
  end
end

-- a place is taken by the first creation, and kept for the verifier: only who has none can find them all taken
local function has_room()
  if placed then return true end
  local taken = redis.call('ZCARD', KEYS[4])
  if taken < allowed_concurrency(limits, ARGV[6]) then return true end
  return ahead == 0 and taken < probe_concurrency(KEYS[1], limits, ARGV[6], now)
end
local room = has_room()
if not room and ARGV[3] == '2' then
  local batch = -tonumber(redis.call('ZSCORE', KEYS[9], ARGV[2]) or '0')
  if batch > 0 and batch_is_over(batch, allowed_concurrency(limits, ARGV[6]), KEYS[9], 0) then
    redis.call('ZREM', KEYS[2], ARGV[1])
    redis.call('ZREM', KEYS[3], ARGV[1])
    return {4, arrival}
  end
end

if ahead > 0 or now < possible_at or not room then
  local wait = math.ceil(math.max(0, possible_at - now) + ahead * interval)
  -- a halved rate is back within seconds: nobody gives up a long wait for it
  local soonest = rate > 0 and ahead * 1000 / math.max(rate, margin(limits, now) * tonumber(limits.refused_rate or '0')) or 0
  if room and math.max(0, possible_at - now) + soonest > tonumber(ARGV[7]) then
    redis.call('ZREM', KEYS[2], ARGV[1])
    redis.call('ZREM', KEYS[3], ARGV[1])
    return {2, arrival, wait}
  end
  -- without room it is a deletion that has to come first, and that wakes; at no rate the one ahead does, when it goes
  if not room or wait <= 0 then wait = tonumber(ARGV[8]) end
  wait = math.min(wait, tonumber(ARGV[8]))
  redis.call('ZADD', KEYS[2], score, ARGV[1])
  redis.call('ZADD', KEYS[3], now + wait, ARGV[1])
  return {0, arrival, wait}
end

local waited = redis.call('ZREM', KEYS[2], ARGV[1]) == 1
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[8])
redis.call('SET', KEYS[7], now, 'PX', 120000)
redis.call('ZADD', KEYS[4], CREATING, ARGV[2])
redis.call('HINCRBY', KEYS[5], 'creations', 1)
if rate > 0 then
  -- a waiter that woke a little late must not slow down everybody after it; but where no burst passes, who comes after
  -- it would be refused for coming too soon
  local _, strict = margin(limits, now)
  local slack = strict and math.max(0, interval - 1000 / tonumber(limits.refused_rate)) / 2 or interval / 2
  local from = waited and math.max(possible_at, now - slack) or now
  possible_at = from + interval
  redis.call('HSET', KEYS[1], 'next_creation', string.format('%.3f', possible_at))
end
local idle = now - tonumber(limits.granted_at or now)
if limits.eased_at and idle > 10000 and now > tonumber(limits.eased_at) then
  redis.call('HSET', KEYS[1], 'eased_at', tonumber(limits.eased_at) + idle)
end
-- how fast creations have really been let through lately: both numbers are halved now and then, so the old fades
local granted, since = tonumber(limits.granted or '0'), tonumber(limits.granted_since or now)
if idle > 10000 then granted, since = 0, now end
if now - since > 20000 then granted, since = granted / 2, now - (now - since) / 2 end
redis.call('HSET', KEYS[1], 'granted', granted + 1, 'granted_since', since, 'granted_at', now)
wake_creator(KEYS[2], KEYS[3], ARGV[9], possible_at)
return {1, arrival}
