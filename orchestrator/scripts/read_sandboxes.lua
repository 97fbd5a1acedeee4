-- Adds up the sandboxes that may still run, by role and state. Two looks each, some 2 us.
-- Needs: money.
-- KEYS: 1 allocations
-- ARGV: 1 allocation key prefix, 2 vCPUs and 3 memory in MB of one whose size nobody has read yet and whose episode has
--       no reservation that was reckoned with one, 4 episode key prefix,
--       5 pico-dollars per vCPU-second and 6 per GiB-second of one whose episode has no rates of its own
-- Returns: a JSON object: "role:state" -> {count, "pico-dollars of an hour"}; one past its longest life is counted and
--          adds no price: the provider has ended it, and it costs no more
local found, now = {}, now_ms()
for _, allocation in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local row = redis.call('HMGET', ARGV[1] .. allocation, 'role', 'state', 'vcpus', 'memory_mb', 'created_at', 'creating_ms',
                         'longest_ms', 'episode')
  if row[2] then
    local name = row[1] .. ':' .. row[2]
    local sum = found[name] or {0, 0}
    local over = row[5] and row[7] and now > row[5] - (row[6] or 0) + row[7]
    local hourly = 0
    if not over then
      local episode = redis.call('HMGET', ARGV[4] .. row[8], 'rates', 'size')
      local per_vcpu, per_gib = rates_of(episode[1], ARGV[5], ARGV[6])
      local vcpus, memory = row[3], row[4]
      if not (vcpus and memory) then vcpus, memory = string.match(episode[2] or '', '^(%d+):(%d+)$') end
      hourly = 3600 * ((vcpus or ARGV[2]) * per_vcpu + (memory or ARGV[3]) * per_gib / 1024)
    end
    found[name] = {sum[1] + 1, sum[2] + hourly}
  end
end
for _, sum in pairs(found) do sum[2] = string.format('%.0f', sum[2]) end
return next(found) and cjson.encode(found) or '{}'
