-- What was noted before Redis's clock stepped back. A script whose header says "Needs: clock" is sent with this before it.
--
-- Times are absolute, TTLs too: Redis keeps the moment at which a key ends. When the clock steps back, what is noted lies
-- too far ahead, and the dead would live on for as long as the step. So no end is believed that is further away than the
-- life it was given with, and nothing that has happened after now. What is left of a life nobody knows: it begins anew,
-- which gives the living the time to say so and lets the dead run out.

-- Scores above `latest` become `anew`.
local function pull_back(zset, latest, anew)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', zset, string.format('(%.0f', latest), '+inf')) do
    redis.call('ZADD', zset, string.format('%.0f', anew), member)
  end
end

-- A key that ends by itself ends within `life` ms from now; nil is a life that nobody noted.
local function pull_back_key(key, life)
  if life and redis.call('PTTL', key) > life then redis.call('PEXPIRE', key, life) end
end

-- Of these fields, moments in the past, those that lie ahead are put back by as much as makes the latest of them the last
-- millisecond: what is between them stays. Changes the hash, and `row`, what was read of it; returns whether it had to.
local function put_back(key, row, names, now)
  local latest = now
  for _, name in ipairs(names) do latest = math.max(latest, tonumber(row[name] or '0')) end
  if latest == now then return false end
  for _, name in ipairs(names) do
    local at = tonumber(row[name] or '0')
    if at > now then
      row[name] = string.format('%.0f', at - (latest - now) - 1)
      redis.call('HSET', key, name, row[name])
    end
  end
  return true
end
