-- Lets no lease end further away than its life: such a one was given before the clock stepped back, and begins anew.
-- Needs: leases.
-- KEYS: 1 leases
-- ARGV: 1 prefix of an episode's row, 2 life ms of a lease whose row does not say
-- Returns: how many there were
local now, shortened = now_ms(), 0
local far = redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%.0f', now + ARGV[2]), '+inf', 'WITHSCORES')
for i = 1, #far, 2 do
  local life = tonumber(redis.call('HGET', ARGV[1] .. far[i], 'lease_ms') or ARGV[2])
  if tonumber(far[i + 1]) > now + life then
    redis.call('ZADD', KEYS[1], now + life, far[i])
    shortened = shortened + 1
  end
end
return shortened
