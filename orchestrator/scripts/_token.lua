-- Fencing tokens: each is greater than all before. A failover to a replica may forget the last ones, so none is below
-- Redis's time either: what was handed out before an outage stays smaller than what comes after it.
local function next_token(counter)
  local token = math.max(tonumber(redis.call('GET', counter) or '0') + 1, now_ms())
  redis.call('SET', counter, string.format('%.0f', token))
  return token
end
