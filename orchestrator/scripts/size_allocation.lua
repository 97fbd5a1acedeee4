-- Notes a sandbox's real size, also as its template's, and reckons its episode's reservation anew with it. A row
-- that has expired meanwhile is not written anew: it would have no life of its own.
-- Needs: money.
-- KEYS: 1 allocation row, 2 episode row, 3 sizes of templates, 4 the farm's budget
-- ARGV: 1 vcpus, 2 memory in MiB, 3 pico-dollars per vCPU-second, 4 the same per GiB-second, 5 prefix of a run's budget
--       (3 and 4 for an episode without rates of its own)
-- Returns: 1 noted, or there is no such row any more; 0 noted, and the sandbox is larger than what was reserved for and
--          a budget cannot bear that
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
redis.call('HSET', KEYS[1], 'vcpus', ARGV[1], 'memory_mb', ARGV[2])
local row = redis.call('HMGET', KEYS[2], 'run', 'template', 'size', 'rates', 'too_large')
if not row[1] then return 1 end
local size = ARGV[1] .. ':' .. ARGV[2]
redis.call('HSET', KEYS[3], row[2], size)
if row[3] == size then return row[5] == size and 0 or 1 end  -- said again: its answer was lost, or by its verifier
local per_vcpu, per_gib = rates_of(row[4], ARGV[3], ARGV[4])
local more = 0
for _, role in ipairs({'policy', 'verifier'}) do
  local held = redis.call('HGET', KEYS[2], 'reserved_' .. role)
  if held then
    local seconds = tonumber(redis.call('HGET', KEYS[2], role .. '_seconds'))
    local needed = highest_price(seconds, tonumber(ARGV[1]), tonumber(ARGV[2]), per_vcpu, per_gib)
    more = more + needed - tonumber(held)
    redis.call('HSET', KEYS[2], 'reserved_' .. role, string.format('%.0f', needed), 'size', size)
  end
end
local run = ARGV[5] .. row[1]
if more ~= 0 then move_money(KEYS[4], run, more, 0) end
if more <= 0 or not (overdrawn(KEYS[4]) or overdrawn(run)) then return 1 end
redis.call('HSET', KEYS[2], 'too_large', size)
return 0
