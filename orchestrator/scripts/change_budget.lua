-- Sets or takes away the limit of a budget.
-- KEYS: 1 the budget
-- ARGV: 1 limit in pico-dollars or '' for none, 2 life in seconds of a run's budget, 0 for the farm's
-- Returns: {limit or false, spent, reserved} as they are now, as text
if ARGV[1] == '' then
  redis.call('HDEL', KEYS[1], 'limit')
else
  redis.call('HSET', KEYS[1], 'limit', ARGV[1])
end
if ARGV[2] ~= '0' then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
return redis.call('HMGET', KEYS[1], 'limit', 'spent', 'reserved')
