-- Adds up the sandboxes that may still run, by role and state. One look at each row, some 1 us a row.
-- KEYS: 1 allocations
-- ARGV: 1 allocation key prefix, 2 vCPUs and 3 memory in MB of one whose size is not known yet
-- Returns: a JSON object: "role:state" -> {count, vCPUs, memory in MB}; one past its longest life is counted and adds no
--          size: the provider has ended it, and it costs no more
local t = redis.call('TIME')
local found, now = {}, t[1] * 1000 + math.floor(t[2] / 1000)
for _, allocation in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local row = redis.call('HMGET', ARGV[1] .. allocation, 'role', 'state', 'vcpus', 'memory_mb', 'created_at', 'creating_ms',
                         'longest_ms')
  if row[2] then
    local name = row[1] .. ':' .. row[2]
    local sum = found[name] or {0, 0, 0}
    local over = row[5] and row[7] and now > row[5] - (row[6] or 0) + row[7]
    found[name] = {sum[1] + 1, sum[2] + (over and 0 or tonumber(row[3] or ARGV[2])),
                   sum[3] + (over and 0 or tonumber(row[4] or ARGV[3]))}
  end
end
return next(found) and cjson.encode(found) or '{}'
