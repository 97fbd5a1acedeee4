-- What an episode cost, counted once nothing of it can cost any more. A script whose header says "Needs: costs" is sent
-- with this before it.

-- The row keeps what its settled sandboxes cost, `counted` sees to the once.
local function observe_cost(row, counters, bounds)
  if redis.call('HSETNX', row, 'cost_counted', 1) == 0 then return end
  local cost = tonumber(redis.call('HGET', row, 'cost_picousd') or '0')
  local under = '+Inf'
  for _, bound in ipairs(cjson.decode(bounds)) do
    if cost <= bound[2] then
      under = bound[1]
      break
    end
  end
  redis.call('HINCRBY', counters, 'episode_cost:le:' .. under, 1)
  redis.call('HINCRBY', counters, 'episode_cost:sum', cost)
end
