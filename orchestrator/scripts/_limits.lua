-- What the limiter's scripts share: the limits in force, and who is woken. A script whose header says "Needs: limits"
-- is sent with this before it. `now_ms` stands before both (scripts/__init__.py): Redis's time.
-- Needs: clock.
--
-- farm:limits, fields (times in ms):
--   concurrency, rate        what was set while the farm runs; absent: each process's own settings
--   effective                lowered concurrency limit after a concurrency 429; absent: the configured one is in force
--   effective_at             when it was lowered or raised last, to the configured one too
--   probe_ms, probed         how long until it is raised by one; whether the last raise is still untested
--   freed_at                 when a sandbox was last confirmed absent
--   held, held_at            the most sandboxes that ran at once lately, and when
--   ran                      how many ran when the limit was lowered last
--   lagged, lagged_at        refusals one after another that a deletion explained, and when the last one was
--   next_creation            earliest time of the next creation
--   cooldown_until, cooldown_at  the pause that a rate 429 asked for, and when it was noted
--   refused_rate, refused_at the rate (a second) that the provider refused last, and when
--   strict_at                when the provider refused one of the first few creations: it lets no burst pass
--   eased_at                 since when the rate has been coming back from there; stands still while nobody creates
--   streak                   refusals one after another that named no Retry-After
--   granted, granted_since   creations let through since then, without those answered 429
--   granted_at               when the last creation was let through
--   arrivals                 counter that orders the waiting line

local BACK_SECONDS = 2       -- from half of the refused rate to just under it
local UNDER = 0.97           -- just under: a provider that counts in a rolling second refuses the exact rate for jitter
local UNDER_STRICT = 0.9     -- and one that lets nothing pass ahead of its time refuses for any jitter at all
local STRICT_MS = 600000     -- so long it is remembered that it does
local PLATEAU_SECONDS = 30   -- from there the cube of time: past the refused rate after this, 1.8 times it after four
local GRACE_MS = 250         -- a waiter this late for its turn is passed over; 1 to 50 ms is usual
local PATIENCE_MS = 15000    -- and taken out of the line after this: its process is gone
local PROBE_MS = 5000        -- first step up of a lowered concurrency limit; doubled while the steps are refused
local LONGEST_PROBE_MS = 600000  -- a cap that stays costs one refused creation in ten minutes
local FORGET_MS = 600000     -- what was learned of a cap is forgotten when the full limit has stood for so long
local HELD_MS = 60000        -- so long it is remembered how many the provider let run: its cap may fall
local CREATING, RUNNING = 1, 2   -- what the score of a place says; 0: none of its sandboxes exists now
local LONGEST_PAUSE_MS = 600000  -- what is believed of a Retry-After, and of a pause noted before the clock stepped back
local HOLD_MS = 5000         -- a longer pause is waited for in line for a permit, where no deadline runs
local CLASS = 1e12           -- places in line: class * CLASS + arrival
local SILENT_MS = 15000      -- who waits in line for permits asks every five seconds; longer silent, its process is gone
local HAPPENED = {'cooldown_at', 'effective_at', 'freed_at', 'held_at', 'lagged_at', 'refused_at', 'granted_at',
                  'granted_since', 'strict_at'}

-- farm:limits as it stands; after a step back of the clock what has happened is put back, what was to come is over.
local function read_hash(key)
  local raw, row = redis.call('HGETALL', key), {}
  for i = 1, #raw, 2 do row[raw[i]] = raw[i + 1] end
  local now = now_ms()
  local paused = tonumber(row.cooldown_at or '0') > now
  if put_back(key, row, HAPPENED, now) then
    for _, name in ipairs(paused and {'cooldown_at', 'cooldown_until', 'next_creation'} or {'next_creation'}) do
      row[name] = nil
      redis.call('HDEL', key, name)
    end
    if tonumber(row.eased_at or '0') > now then
      row.eased_at = now
      redis.call('HSET', key, 'eased_at', now)
    end
  end
  return row
end

local function push_wake(list)
  redis.call('LPUSH', list, '1')
  redis.call('EXPIRE', list, 60)
end

-- Wake the first in a line; one that is not there loses nothing, and a wake too many costs one question.
local function wake_first(line, prefix)
  local first = redis.call('ZRANGE', line, 0, 0)[1]
  if first then push_wake(prefix .. first) end
end

-- A place is free, or somebody has left the line for permits: wake the first episode and the first batch in it.
local function wake_line(waiters, batches, prefix)
  wake_first(waiters, prefix)
  wake_first(batches, prefix)
end

-- Take those out of the line for permits, in these sets, who have not asked for long.
local function drop_silent(seen, now, waiters, batches)
  pull_back(seen, now, now)
  for _, silent in ipairs(redis.call('ZRANGEBYSCORE', seen, '-inf', now - SILENT_MS)) do
    for _, key in ipairs({seen, waiters, batches}) do redis.call('ZREM', key, silent) end
  end
end

-- The place of the first batch in line that a limit bears. One larger than a lowered limit waits for that to be raised,
-- not for a place: what it cannot have others may.
local function first_batch(batches, limit)
  local line = redis.call('ZRANGE', batches, 0, -1, 'WITHSCORES')
  for i = 1, #line, 2 do
    if tonumber(string.match(line[i], '^%d+')) <= limit then return line[i + 1] end
  end
end

-- The place behind everybody in these sets: Redis's time, and more where many ask within a millisecond or the clock has
-- stepped back.
local function last_place(now, ...)
  local place = now
  for _, key in ipairs({...}) do
    local last = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
    if last then place = math.max(place, tonumber(last) + 1) end
  end
  return place
end

-- The live slots that take a queue's jobs, and the permits of other queues' episodes. A farm has one queue as a rule, so
-- permits are looked at only where some slot takes another's. A worker or episode that names none is taken for ours.
-- `workers` and `episodes` are key prefixes; queue '' stands for all queues together.
local function places_of_queue(queue, slots, permits, workers, episodes, now)
  local here, elsewhere, queue_of = 0, false, {}
  for _, slot in ipairs(redis.call('ZRANGEBYSCORE', slots, now, '+inf')) do
    local worker = string.match(slot, '^(.*)%-[^-]*$') or slot
    local theirs = queue_of[worker] or queue ~= '' and redis.call('HGET', workers .. worker, 'queue') or ''
    queue_of[worker] = theirs
    if theirs == '' or theirs == queue then here = here + 1 else elsewhere = true end
  end
  local others = 0
  if elsewhere then
    for _, episode in ipairs(redis.call('ZRANGE', permits, 0, -1)) do
      local theirs = redis.call('HGET', episodes .. episode, 'queue') or queue
      if theirs ~= '' and theirs ~= queue then others = others + 1 end
    end
  end
  return here, others
end

local function write_reservation(key, name, row)
  redis.call('HSET', key, name, string.format('%d:%s:%d:%s', row.left, row.ends, row.total, row.life))
end

-- What is reserved at `now`: {left, total} by reservation, and how much that is. A row is "left:ends at ms:total:life ms";
-- rows that are over are dropped.
local function read_reservations(key, now)
  local rows, reserved = {}, 0
  local raw = redis.call('HGETALL', key)
  for i = 1, #raw, 2 do
    local left, ends, total, life = string.match(raw[i + 1], '^(%d+):(%d+):(%d+):?(%d*)$')
    if tonumber(ends) <= now or tonumber(left) == 0 then
      redis.call('HDEL', key, raw[i])
    else
      local row = {left = tonumber(left), ends = ends, total = tonumber(total), life = life}
      if life ~= '' and tonumber(ends) > now + life then
        row.ends = string.format('%.0f', now + life)
        write_reservation(key, raw[i], row)
      end
      rows[raw[i]] = row
      reserved = reserved + row.left
    end
  end
  return rows, reserved
end

-- How far below the refused rate creations go on: a share of it; and whether the provider lets no burst pass.
local function margin(limits, now)
  local strict = limits.strict_at and now - tonumber(limits.strict_at) < STRICT_MS
  return strict and UNDER_STRICT or UNDER, strict
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
  local under = margin(limits, now)
  if since < BACK_SECONDS then
    rate = refused * (0.5 + (under - 0.5) * since / BACK_SECONDS)
  else
    rate = refused * (1 + (1 - under) * ((since - BACK_SECONDS) / PLATEAU_SECONDS - 1) ^ 3)
  end
  if configured > 0 and rate > configured then return configured end
  return rate
end

-- Until when a rate 429 lets nobody create.
local function paused_until(limits, now)
  return math.min(tonumber(limits.cooldown_until or '0'), now + LONGEST_PAUSE_MS)
end

-- The concurrency limit in force, and the configured one.
local function allowed_concurrency(limits, default)
  local configured = tonumber(limits.concurrency or default)
  return math.min(configured, tonumber(limits.effective or configured)), configured
end

-- Somebody asks at a lowered limit: raise it when it has stood long enough, by one or, for a batch that is created
-- together or not at all, to `wanted`. Returns the limit now in force.
local function probe_concurrency(key, limits, default, now, wanted)
  local limit, configured = allowed_concurrency(limits, default)
  if not limits.effective or limit >= configured then return limit end
  local patience = tonumber(limits.probe_ms)
  if now - tonumber(limits.effective_at) < patience then return limit end
  local raised = math.min(configured, wanted or limit + 1)
  -- a step before this one that nobody refused: go on faster
  if limits.probed == '1' then patience = math.max(PROBE_MS, patience / 2) end
  redis.call('HSET', key, 'effective', raised, 'effective_at', now, 'probe_ms', patience, 'probed', '1')
  if raised >= configured then redis.call('HDEL', key, 'effective') end
  return raised
end

-- How long a limit that is refused now has to stand before it is raised again: twice as long where it was a raise that
-- was refused, also one to the configured limit, unless that has stood for long.
local function patience_after_refusal(limits, now)
  local stood = now - tonumber(limits.effective_at or '0')
  if not limits.probe_ms or not limits.effective and stood > FORGET_MS then return PROBE_MS end
  local patience = tonumber(limits.probe_ms)
  return limits.probed == '1' and math.min(LONGEST_PROBE_MS, patience * 2) or patience
end

-- Whether a batch of `total` can no longer be live at once: its members wait for each other and free no place for the
-- missing ones, and so do two batches that have got a part each. `left` is reserved and not admitted yet. A permit's
-- score is minus its batch's size (acquire_permit.lua).
local function batch_is_over(total, limit, permits, left)
  return total > limit or redis.call('ZCOUNT', permits, '-inf', '(0') + left > limit
end

-- A sandbox runs or is gone. When one more runs than when the limit was lowered, and none was deleted in between, it was
-- not their number that was refused: the configured limit is in force again.
local function note_sandbox(places, episode, limits_key, runs, now)
  redis.call('ZADD', places, 'XX', runs and RUNNING or 0, episode)
  if not runs then return end
  local running = redis.call('ZCOUNT', places, RUNNING, RUNNING)
  local limits = read_hash(limits_key)
  if running >= tonumber(limits.held or '0') or now - tonumber(limits.held_at) > HELD_MS then
    redis.call('HSET', limits_key, 'held', running, 'held_at', now)
  end
  if limits.effective and running > tonumber(limits.ran or running) then
    redis.call('HDEL', limits_key, 'ran')
    if tonumber(limits.freed_at or '0') < tonumber(limits.effective_at) then
      redis.call('HDEL', limits_key, 'effective')
      redis.call('HSET', limits_key, 'effective_at', now, 'probed', '1')
    end
  end
end

-- Take those out of the line of creators, but for `mine`, whose time to ask again is long past: their process is gone.
local function drop_dead(line, due, now, mine)
  local dropped = 0
  pull_back(due, now + PATIENCE_MS, now)
  for _, dead in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', '(' .. string.format('%.0f', now - PATIENCE_MS))) do
    if dead ~= mine then
      redis.call('ZREM', line, dead)
      redis.call('ZREM', due, dead)
      dropped = dropped + 1
    end
  end
  return dropped
end

-- Wake the first who waits to create, unless it comes by itself when the next creation is possible.
local function wake_creator(line, due, prefix, possible_at)
  local first = redis.call('ZRANGE', line, 0, 0)[1]
  if first and tonumber(redis.call('ZSCORE', due, first) or '0') > possible_at + 1 then push_wake(prefix .. first) end
end

-- Somebody has left the line, or a place: wake whoever is first now, unless a pause or the rate holds it up anyway.
local function wake_next_creator(limits_key, line, due, prefix)
  local limits = read_hash(limits_key)
  wake_creator(line, due, prefix, math.max(tonumber(limits.next_creation or '0'), paused_until(limits, now_ms())))
end

-- Free an episode's permit and its place at the provider; wake those whom that lets on. Returns how much was freed.
local function free_permit(episode, permits, places, limits_key, line, due, prefix)
  local freed = redis.call('ZREM', permits, episode)
  if redis.call('ZREM', places, episode) == 1 then wake_next_creator(limits_key, line, due, prefix) end
  return freed
end
