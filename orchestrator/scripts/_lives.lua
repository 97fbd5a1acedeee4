-- How long what belongs to a receipt is kept. A script whose header says "Needs: lives" is sent with this before it.
--
-- Processes of one farm may differ in how long they keep receipts. So each receipt's own end is noted beside the lists,
-- nobody takes one off them that is still there, and no key's life is made shorter by whoever writes next.

local TRIMMED = 20  -- looked at by one commit, which adds one: lists shrink to what is there, and no commit takes long

-- A key is kept for `ms` from now at least; one that has no end yet gets this one, one that is gone stays so.
local function outlive(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, string.format('%.0f', ms)) end
end

local REMEMBERED = 86400000  -- ms past all that is kept of an episode; long past its job's envelope too

-- Keep the attempt at which an episode ended for longer than `ms`, which is as long as anything of it is kept: an episode
-- of the same id that comes later begins above it, or it would take those jobs and sandboxes for its own.
local function remember_attempt(mark, row, ms)
  local life = math.max(redis.call('PTTL', mark), ms + REMEMBERED)
  redis.call('SET', mark, redis.call('HGET', row, 'attempt'), 'PX', string.format('%.0f', life))
end

-- Some of what has ended by now, by a list of ends.
local function ended_of(ends, now) return redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, TRIMMED) end

-- Take from the index what has lost its receipt, wherever it stands there.
local function trim_index(index, ends, now)
  for _, episode in ipairs(ended_of(ends, now)) do
    redis.call('ZREM', index, episode)
    redis.call('ZREM', ends, episode)
  end
end

-- The same of a run's stream, by the ids of its entries.
local function trim_stream(stream, ends, now)
  for _, entry in ipairs(ended_of(ends, now)) do
    redis.call('XDEL', stream, entry)
    redis.call('ZREM', ends, entry)
  end
end
