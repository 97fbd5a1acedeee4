-- Remembers a 429 for everybody; counts it when it answered a creation. Needs: limits.
-- rate: pauses every creation; the first answer of a burst also lowers the rate. What is remembered as refused is the
--   lesser of the rate in force and what was really let through: from one refusal to the next those are equal to what
--   the provider allows, however large its burst is. One refusal is not believed further than half of the rate. A
--   provider that refuses one of the first few lets no burst pass: it refuses for jitter, and its pauses lower what is
--   let through below what it allows; there the rate in force is what was refused.
-- concurrency: lowers the limit to what runs now. While a deletion is fresh the provider's count may only lag: then the
--   creation keeps its place and nothing is lowered, three times.
-- A refusal that comes without a header may be of the rate kind all the same. It is taken for that when fewer run than
--   the provider let run lately, or when deletions would have to explain one refusal after another: fewer creations a
--   second cure that, too.
-- KEYS: 1 limits, 2 counters, 3 the creation's leave, 4 places at the provider
-- ARGV: 1 kind (rate or concurrency), 2 Retry-After ms or '', 3 jitter (0.75 to 1.25), 4 episode id ('' when it was not
--       a creation that was refused), 5 default rate, 6 default concurrency limit, 7 how often this creation was refused
--       before
-- Returns: {ms until the shared pause ends, ms that this creation should wait by itself}
local now = now_ms()
local limits = read_hash(KEYS[1])
local cooldown = paused_until(limits, now)
local leave = ARGV[4] ~= '' and redis.call('GET', KEYS[3])
if leave == 'refused' then return {math.max(0, cooldown - now), 0} end  -- told again after a lost answer
if ARGV[4] ~= '' then redis.call('HINCRBY', KEYS[2], 'rate_limited:' .. ARGV[1], 1) end
if leave then redis.call('SET', KEYS[3], 'refused', 'KEEPTTL') end
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[4], 'XX', 0, ARGV[4]) end
local running = redis.call('ZCOUNT', KEYS[4], CREATING, RUNNING)

local function counts_lag()
  return tonumber(ARGV[7]) < 3 and now - tonumber(limits.freed_at or '0') < 3000
end

local function seems_rate()
  if counts_lag() then
    local lagged = now - tonumber(limits.lagged_at or '0') < 10000 and tonumber(limits.lagged) or 0
    redis.call('HSET', KEYS[1], 'lagged', lagged + 1, 'lagged_at', now)
    return lagged >= 3
  end
  return running < tonumber(limits.held or '0') and now - tonumber(limits.held_at) < HELD_MS
end

if ARGV[1] == 'concurrency' and not seems_rate() then
  if counts_lag() then return {0, math.floor(500 * 2 ^ ARGV[7] * ARGV[3])} end
  redis.call('ZREM', KEYS[4], ARGV[4])
  local _, configured = allowed_concurrency(limits, ARGV[6])
  local patience = patience_after_refusal(limits, now)
  redis.call('HSET', KEYS[1], 'effective', math.min(configured, redis.call('ZCARD', KEYS[4])), 'effective_at', now,
             'probe_ms', patience, 'probed', '0', 'ran', running)
  return {0, 0}
end

local TELLING = 5  -- so many creations tell a rate; the second of a provider that lets no burst pass does not
local refused_at = tonumber(limits.refused_at or '0')
local fresh = leave and tonumber(leave) > refused_at
local streak = 0
local pause = tonumber(ARGV[2])
if not pause then
  -- only what is refused again right after its pause has to wait longer
  if fresh and limits.refused_at and now - cooldown < 5000 then streak = tonumber(limits.streak or '0') + 1 end
  pause = (fresh or ARGV[4] == '') and math.min(30000, 1000 * 2 ^ streak) * ARGV[3] or 0
end
cooldown = math.max(cooldown, math.floor(now + math.min(pause, LONGEST_PAUSE_MS)))
redis.call('HSET', KEYS[1], 'cooldown_until', cooldown, 'cooldown_at', now)
local granted = tonumber(limits.granted or '0')
if leave then granted = math.max(0, granted - 1) end
if fresh then
  local rate = allowed_rate(limits, ARGV[5], now)
  local seconds = (now - tonumber(limits.granted_since or now)) / 1000
  local measured = (granted + 1) / math.max(1, seconds)  -- too high by one at most: too low would last for minutes
  if rate > 0 and granted + 1 < TELLING then
    -- only one that had time to rest: right after a pause no bucket is full
    if now - refused_at > 20000 then redis.call('HSET', KEYS[1], 'strict_at', now) end
    measured = rate
  end
  if rate > 0 and select(2, margin(limits, now)) then measured = rate end
  local refused = rate > 0 and math.max(rate / 2, math.min(rate, measured)) or measured
  redis.call('HSET', KEYS[1], 'refused_rate', string.format('%.4f', math.max(0.1, refused)), 'refused_at', now,
             'eased_at', cooldown, 'streak', streak, 'granted', granted)
  -- between refusals that follow each other the provider was never idle: then the longer measure is the better one
  if now - refused_at > 20000 then
    redis.call('HSET', KEYS[1], 'granted', 0, 'granted_since', now)
  end
elseif limits.eased_at then
  redis.call('HSET', KEYS[1], 'granted', granted, 'eased_at', math.max(cooldown, tonumber(limits.eased_at)))
end
return {cooldown - now, 0}
