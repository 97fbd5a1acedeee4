-- What the limiter's scripts share: the limits in force, and who is woken. A script whose header says "Needs: limits"
-- is sent with this before it. `now_ms` stands before both (scripts/__init__.py): Redis's time.
--
-- farm:limits, fields (times in ms):
--   concurrency, rate        what was set while the farm runs; absent: each process's own settings
--   effective                lowered concurrency limit after a concurrency 429; absent: the configured one is in force
--   effective_at             when it was lowered or raised last
--   probe_ms, probed         how long until it is raised by one; whether the last raise is still untested
--   freed_at                 when a sandbox was last confirmed absent
--   next_creation            earliest time of the next creation
--   cooldown_until           the pause that a rate 429 asked for
--   refused_rate, refused_at the rate (a second) that the provider refused last, and when
--   eased_at                 since when the rate has been coming back from there; stands still while nobody creates
--   streak                   refusals one after another that named no Retry-After
--   granted, granted_since   creations let through since then, without those answered 429
--   granted_at               when the last creation was let through
--   arrivals                 counter that orders the waiting line

local BACK_SECONDS = 2       -- from half of the refused rate to just under it
local UNDER = 0.97           -- just under: a provider that counts in a rolling second refuses the exact rate for jitter
local PLATEAU_SECONDS = 30   -- from there the cube of time: past the refused rate after this, 1.8 times it after four
local GRACE_MS = 250         -- a waiter this late for its turn is passed over; 1 to 50 ms is usual
local PATIENCE_MS = 15000    -- and taken out of the line after this: its process is gone
local PROBE_MS = 5000        -- first step up of a lowered concurrency limit; doubled while the steps are refused
local LONGEST_PROBE_MS = 600000  -- a cap that stays costs one refused creation in ten minutes
local CLASS = 1e12           -- places in line: class * CLASS + arrival

local function read_hash(key)
  local raw, row = redis.call('HGETALL', key), {}
  for i = 1, #raw, 2 do row[raw[i]] = raw[i + 1] end
  return row
end

local function push_wake(prefix, name)
  redis.call('LPUSH', prefix .. name, '1')
  redis.call('EXPIRE', prefix .. name, 60)
end

-- Creations a second at `now`, 0 for no limit. After a refusal: half the refused rate, back to just under it within
-- seconds, a long plateau around it, then faster and faster (the shape of TCP CUBIC, RFC 9438), never past the
-- configured rate.
local function allowed_rate(limits, default, now)
  local configured = tonumber(limits.rate or default)
  local refused = tonumber(limits.refused_rate)
  if not refused then return configured end
  local since = math.max(0, now - tonumber(limits.eased_at)) / 1000
  local rate
  if since < BACK_SECONDS then
    rate = refused * (0.5 + (UNDER - 0.5) * since / BACK_SECONDS)
  else
    rate = refused * (1 + (1 - UNDER) * ((since - BACK_SECONDS) / PLATEAU_SECONDS - 1) ^ 3)
  end
  if configured > 0 and rate > configured then return configured end
  return rate
end

-- The concurrency limit in force, and the configured one.
local function allowed_concurrency(limits, default)
  local configured = tonumber(limits.concurrency or default)
  return math.min(configured, tonumber(limits.effective or configured)), configured
end

-- Somebody asks at a lowered limit: raise it by one when it has stood long enough. Returns the limit now in force.
local function probe_concurrency(key, limits, default, now)
  local limit, configured = allowed_concurrency(limits, default)
  if not limits.effective or limit >= configured then return limit end
  local patience = tonumber(limits.probe_ms)
  if now - tonumber(limits.effective_at) < patience then return limit end
  if limit + 1 >= configured then
    redis.call('HDEL', key, 'effective', 'effective_at', 'probe_ms', 'probed')
  else
    -- a step before this one that nobody refused: go on faster
    if limits.probed == '1' then patience = math.max(PROBE_MS, patience / 2) end
    redis.call('HSET', key, 'effective', limit + 1, 'effective_at', now, 'probe_ms', patience, 'probed', '1')
  end
  return limit + 1
end

-- Wake the first who waits to create, unless it comes by itself when the next creation is possible.
local function wake_creator(line, due, prefix, possible_at)
  local first = redis.call('ZRANGE', line, 0, 0)[1]
  if first and tonumber(redis.call('ZSCORE', due, first) or '0') > possible_at + 1 then push_wake(prefix, first) end
end

-- Free an episode's permit and its place at the provider; wake those whom that lets on. Returns how much was freed.
local function free_permit(episode, permits, places, limits_key, line, due, prefix)
  local freed = redis.call('ZREM', permits, episode)
  if redis.call('ZREM', places, episode) == 1 then
    local times = redis.call('HMGET', limits_key, 'next_creation', 'cooldown_until')
    wake_creator(line, due, prefix, math.max(tonumber(times[1] or '0'), tonumber(times[2] or '0')))
  end
  return freed
end
