-- What the scripts that move money share. A script whose header says "Needs: money" is sent with this before it.
-- Money is whole pico-dollars in decimal digits; a Lua number is a double, so sums are made by HINCRBY, and differences
-- by `remainder`.
--
-- The farm's budget and a run's budget, fields:
--   limit     what may be spent in all; absent: no limit
--   spent     what settled sandboxes cost
--   reserved  the most that the sandboxes of episodes with a permit can still cost
-- An episode's row, fields:
--   run, template, policy_seconds, verifier_seconds    what its budget and its reservation depend on: set when it opens
--   reserved_policy, reserved_verifier                 its reservation; each goes when that sandbox is settled, both go
--                                                      with the permit
--   size                                               vcpus:memory_mb that they were reckoned with
--   rates                                              pico-dollars per vCPU-second:per GiB-second of whoever gave the
--                                                      permit; its sandboxes are priced by them wherever they are
--                                                      settled: at other prices they could cost more than is reserved
--   unfunded_at                                        since when its money is reserved for others, later by the time
--                                                      that it was back in the queue; absent: it was not, when it
--                                                      asked last

local RUN_SECONDS = 90 * 86400  -- a run's budget is forgotten this long after its last movement

-- a - b - c, exactly where it matters: near nought
local function remainder(a, b, c)
  local high, low = 0, 0
  for i, text in ipairs({a, b or '0', c or '0'}) do
    local sign = i == 1 and 1 or -1
    high = high + sign * (tonumber(string.sub(text, 1, -10)) or 0)
    low = low + sign * tonumber(string.sub(text, -9))
  end
  return high * 1e9 + low
end

-- 0 the amount is there, 1 it is reserved for others and may come back, 2 it is not there any more
local function shortage(budget, amount)
  local row = redis.call('HMGET', budget, 'limit', 'spent', 'reserved')
  if not row[1] then return 0 end
  if remainder(row[1], row[2]) < amount then return 2 end
  return remainder(row[1], row[2], row[3]) < amount and 1 or 0
end

local function overdrawn(budget)
  local row = redis.call('HMGET', budget, 'limit', 'spent', 'reserved')
  return row[1] and remainder(row[1], row[2], row[3]) < 0
end

-- Add to what a farm and one of its runs have reserved and spent.
local function move_money(farm, run, reserved, spent)
  for _, budget in ipairs({farm, run}) do
    if reserved ~= 0 then redis.call('HINCRBY', budget, 'reserved', string.format('%.0f', reserved)) end
    if spent ~= 0 then redis.call('HINCRBY', budget, 'spent', string.format('%.0f', spent)) end
  end
  redis.call('EXPIRE', run, RUN_SECONDS)
end

-- An episode's rates, or those of whoever asks while it has none.
local function rates_of(rates, per_vcpu, per_gib)
  local of_vcpu, of_gib = string.match(rates or '', '^(%d+):(%d+)$')
  return tonumber(of_vcpu or per_vcpu), tonumber(of_gib or per_gib)
end

-- The most that `seconds` (whole) of a sandbox can cost; prices in pico-dollars a second. Rounded up.
local function highest_price(seconds, vcpus, memory_mb, per_vcpu, per_gib)
  return math.ceil(vcpus * per_vcpu + memory_mb * per_gib / 1024) * seconds
end

-- What is left of an episode's reservation goes back.
local function release_money(row, farm, run_prefix)
  local found = redis.call('HMGET', row, 'run', 'reserved_policy', 'reserved_verifier')
  if not (found[2] or found[3]) then return end
  redis.call('HDEL', row, 'reserved_policy', 'reserved_verifier')
  for part = 2, 3 do move_money(farm, run_prefix .. found[1], -tonumber(found[part] or '0'), 0) end  -- their sum may round
end
