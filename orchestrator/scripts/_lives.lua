-- How long what belongs to a receipt is kept. A script whose header says "Needs: lives" is sent with this before it.
--
-- Processes of one farm may differ in how long they keep receipts. So nobody takes a receipt off a list that is still
-- there, and no key's life is made shorter by whoever writes next.

local TRIMMED = 20  -- looked at by one commit, which adds one: lists shrink to what is there, and no commit takes long

-- A key is kept for `ms` from now at least; one that has no end yet gets this one, one that is gone stays so.
local function outlive(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, string.format('%.0f', ms)) end
end

-- Take from the old end of the index what has lost its receipt.
local function trim_index(index, receipt_prefix)
  for _, episode in ipairs(redis.call('ZRANGE', index, 0, TRIMMED - 1)) do
    if redis.call('EXISTS', receipt_prefix .. episode) == 1 then return end
    redis.call('ZREM', index, episode)
  end
end

-- From which id on a run's stream is kept.
local function first_kept(stream, receipt_prefix)
  local read = redis.call('XREAD', 'COUNT', TRIMMED, 'STREAMS', stream, '0')
  local kept = '0'
  for _, entry in ipairs(read and read[1][2] or {}) do
    if redis.call('EXISTS', receipt_prefix .. entry[2][2]) == 1 then return entry[1] end
    local ms, number = string.match(entry[1], '^(%d+)-(%d+)$')
    kept = ms .. '-' .. string.format('%.0f', number + 1)
  end
  return kept
end
