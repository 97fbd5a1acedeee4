-- Adds up the sandboxes that may still run, by role and state. One look at each row, some 1 us a row.
-- KEYS: 1 allocations
-- ARGV: 1 allocation key prefix
-- Returns: a JSON object: "role:state" -> {count, vCPUs, memory in MB}, of those whose size is known
local found = {}
for _, allocation in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local row = redis.call('HMGET', ARGV[1] .. allocation, 'role', 'state', 'vcpus', 'memory_mb')
  if row[2] then
    local name = row[1] .. ':' .. row[2]
    local sum = found[name] or {0, 0, 0}
    found[name] = {sum[1] + 1, sum[2] + tonumber(row[3] or '0'), sum[3] + tonumber(row[4] or '0')}
  end
end
return next(found) and cjson.encode(found) or '{}'
