package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// noon is where the examples' clocks start; a program leaves the clock to the
// database.
var noon = time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)

// Definitions are values. They are kept where the code that they limit is.
func Example() {
	sendMessage := ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: time.Minute, Capacity: 20}

	// In memory here; package pgstore has the same verbs on PostgreSQL.
	store := memstore.New(func() time.Time { return noon })

	res, err := store.Allow(context.Background(), sendMessage.For("alice"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(res.OK, res.Remaining)
	// Output: true 19
}

// A burst of three, and then one every six seconds.
func ExampleTokenBucket() {
	now := noon
	store := memstore.New(func() time.Time { return now })
	limit := ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: time.Minute, Capacity: 3}

	for range 5 {
		res, err := store.Allow(context.Background(), limit.For("alice"))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(now.Format(time.TimeOnly), res.OK, res.Remaining, res.RetryAfter)
		now = now.Add(res.RetryAfter) // the same call made then succeeds
	}
	// Output:
	// 12:00:00 true 2 0s
	// 12:00:00 true 1 0s
	// 12:00:00 true 0 0s
	// 12:00:00 false 0 6s
	// 12:00:06 true 0 0s
}

// Two sign-ups an hour, all of them at once if need be; the hours begin on
// the hour because of Start.
func ExampleFixedWindow() {
	now := noon.Add(40 * time.Minute)
	store := memstore.New(func() time.Time { return now })
	limit := ratelimit.FixedWindow{
		Name: "sign_up", Rate: 2, Period: time.Hour,
		Start: time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC),
	}

	for range 4 {
		res, err := store.Allow(context.Background(), limit.For(""))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(now.Format(time.TimeOnly), res.OK, res.Remaining, res.RetryAfter)
		now = now.Add(res.RetryAfter)
	}
	// Output:
	// 12:40:00 true 1 0s
	// 12:40:00 true 0 0s
	// 12:40:00 false 0 20m0s
	// 13:00:00 true 1 0s
}

// Windows that nobody used roll over, up to a Capacity above Rate.
func ExampleFixedWindow_rollover() {
	now := noon
	store := memstore.New(func() time.Time { return now })
	limit := ratelimit.FixedWindow{
		Name: "reports", Rate: 10, Period: 24 * time.Hour, Capacity: 30,
		Start: noon,
	}

	for _, n := range []float64{30, 5, 20} {
		res, err := store.Allow(context.Background(), limit.ForN("alice", n))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(now.Format(time.DateOnly), res.OK, res.Remaining)
		now = now.Add(24 * time.Hour)
	}
	// Output:
	// 2025-03-14 true 0
	// 2025-03-15 true 5
	// 2025-03-16 false 15
}

// A customer's plan is a copy of the definition with a rate of its own.
func ExampleTokenBucket_plans() {
	store := memstore.New(func() time.Time { return noon })
	free := ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Second}
	paid := free
	paid.Rate = 100

	for _, r := range []ratelimit.Request{free.For("alice"), paid.For("bob")} {
		res, err := store.Allow(context.Background(), r)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(r.Key, res.Remaining, "of", res.Capacity)
	}
	// Output:
	// alice 9 of 10
	// bob 99 of 100
}

// Several limits in one call: all or nothing. Here the tokens are short, so
// the request is not counted either.
func Example_severalLimits() {
	ctx := context.Background()
	store := memstore.New(func() time.Time { return noon })
	requests := ratelimit.TokenBucket{Name: "llm_requests", Rate: 60, Period: time.Minute}
	tokens := ratelimit.TokenBucket{Name: "llm_tokens", Rate: 40_000, Period: time.Minute}

	for range 2 {
		res, err := store.Allow(ctx, requests.For("acme"), tokens.ForN("acme", 30_000))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(res.OK, res.RetryAfter)
		for _, s := range res.Each {
			fmt.Println(" ", s.Request.Limit.Definition().Name, s.OK, s.Remaining)
		}
	}
	// Output:
	// true 0s
	//   llm_requests true 59
	//   llm_tokens true 10000
	// false 30s
	//   llm_requests true 59
	//   llm_tokens false 10000
}

// A reservation goes into debt and says when the work may run. The caller
// schedules it for then, and does not ask again.
func Example_reserve() {
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "third_party", Rate: 1, Period: time.Second, Capacity: 2, MaxReserved: 2}

	for range 5 {
		res, err := store.Reserve(context.Background(), limit.For(""))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(res.OK, res.RetryAt.Format(time.TimeOnly))
	}
	// Output:
	// true 12:00:00
	// true 12:00:00
	// true 12:00:01
	// true 12:00:02
	// false 12:00:01
}

// Without capacity there are no bursts: however long nobody came, what is
// reserved runs evenly spaced.
func Example_spacing() {
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "mail", Rate: 4, Period: time.Second, Capacity: ratelimit.None}

	for range 4 {
		res, err := store.Reserve(context.Background(), limit.For(""))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(res.RetryAt.Format("15:04:05.00"))
	}
	// Output:
	// 12:00:00.25
	// 12:00:00.50
	// 12:00:00.75
	// 12:00:01.00
}

// A count of 0 asks whether a key is in debt.
func Example_inDebt() {
	ctx := context.Background()
	now := noon
	store := memstore.New(func() time.Time { return now })
	limit := ratelimit.TokenBucket{Name: "llm_tokens", Rate: 100, Period: time.Second}

	// The call used 250 tokens; they are spent, whatever the limit says.
	if _, err := store.Reserve(ctx, limit.ForN("alice", 250)); err != nil {
		log.Fatal(err)
	}
	for range 2 {
		res, err := store.Check(ctx, limit.ForN("alice", 0))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(res.OK, res.Value, res.RetryAfter)
		now = now.Add(res.RetryAfter)
	}
	// Output:
	// false -150 1.5s
	// true 0 0s
}

// A count that can never be granted is an error, and not a wait.
func ExampleNeverError() {
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "llm_tokens", Rate: 40_000, Period: time.Minute}

	_, err := store.Allow(context.Background(), limit.ForN("acme", 50_000))
	fmt.Println(errors.Is(err, ratelimit.ErrNever))
	var never *ratelimit.NeverError
	if errors.As(err, &never) {
		fmt.Println("at most", never.Most)
	}
	fmt.Println(err)
	// Output:
	// true
	// at most 40000
	// ratelimit: limit "llm_tokens": 50000 tokens can never be allowed at once, at most 40000 can
}

// Validate, in a test, finds every bad field of a definition. The verbs
// return the same errors.
func ExampleFieldError() {
	limit := ratelimit.TokenBucket{Name: "send_message", Rate: -10, Capacity: 20}

	err := limit.Validate()
	fmt.Println(errors.Is(err, ratelimit.ErrInvalid))
	var field *ratelimit.FieldError
	if errors.As(err, &field) {
		fmt.Println("first:", field.Field, field.Value)
	}
	fmt.Println(err)
	// Output:
	// true
	// first: Rate -10
	// ratelimit: limit "send_message": Rate -10: must not be negative
	// ratelimit: limit "send_message": Period 0s: must be positive
}

// A refusal is a result, so that it does not roll back a transaction that has
// other work in it. Err makes it an error for those who want one.
func ExampleResult_Err() {
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "password", Rate: 1, Period: time.Minute}

	try := func() error {
		res, err := store.Allow(context.Background(), limit.For("alice"))
		if err != nil {
			return err
		}
		return res.Err()
	}
	fmt.Println(try())
	err := try()
	fmt.Println(err)
	var refused *ratelimit.RefusedError
	if errors.As(err, &refused) {
		fmt.Println("Retry-After:", refused.Result.RetryAfter.Seconds())
	}
	// Output:
	// <nil>
	// ratelimit: limit "password" refused, retry after 1m0s
	// Retry-After: 60
}

// An estimate is taken before the work, and what it did not need given back.
func Example_credit() {
	ctx := context.Background()
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "llm_tokens", Rate: 40_000, Period: time.Minute}

	const estimate, used = 8_000, 1_234
	if _, err := store.Allow(ctx, limit.ForN("acme", estimate)); err != nil {
		log.Fatal(err)
	}
	status, err := store.Credit(ctx, limit.ForN("acme", estimate-used))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(status.Remaining)
	// Output: 38766
}

// A reservation whose work will not run is cancelled: what it took comes
// back, once.
func Example_cancel() {
	ctx := context.Background()
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "third_party", Rate: 1, Period: time.Second, Capacity: 2}

	res, err := store.Reserve(ctx, limit.ForN("", 5))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(res.Value)
	for range 2 {
		cancelled, err := store.Cancel(ctx, res)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("cancelled:", cancelled)
	}
	after, err := store.Check(ctx, limit.ForN("", 0))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(after.Value)
	// Output:
	// -3
	// cancelled: true
	// cancelled: false
	// 2
}

// A third party answered 429 with a Retry-After of 30 seconds: nobody goes
// there before, and nothing that was saved up is left after.
func Example_pause() {
	ctx := context.Background()
	now := noon
	store := memstore.New(func() time.Time { return now })
	limit := ratelimit.TokenBucket{Name: "third_party", Rate: 1, Period: time.Second, Capacity: 10}

	if _, err := store.Pause(ctx, limit.For(""), now.Add(30*time.Second)); err != nil {
		log.Fatal(err)
	}
	for range 2 {
		res, err := store.Allow(ctx, limit.For(""))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(now.Format(time.TimeOnly), res.OK, res.Remaining, res.RetryAfter)
		now = now.Add(res.RetryAfter)
	}
	// Output:
	// 12:00:00 false 0 31s
	// 12:00:31 true 0 0s
}
