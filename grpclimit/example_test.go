package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// call has a limiter decide on a call of a user, as a server does.
func call(limit *grpclimit.Limiter, user string, handler func(ctx context.Context) error) error {
	ctx := metadata.NewIncomingContext(context.Background(), metadata.Pairs("x-user", user))
	_, err := limit.Unary(ctx, nil, &grpc.UnaryServerInfo{FullMethod: "/shop.Orders/Place"}, func(ctx context.Context, _ any) (any, error) {
		return nil, handler(ctx)
	})
	return err
}

func done(context.Context) error { return nil }

// A server limits the calls of each user, who was authenticated by an interceptor before.
func Example() {
	orders := ratelimit.TokenBucket{Name: "orders", Rate: 60, Period: time.Hour, Capacity: 2}
	limit, err := grpclimit.New(memstore.New(nil), &grpclimit.Config{
		Policies: []grpclimit.Policy{{
			Limit:   orders,
			Key:     grpclimit.ByMetadata("x-user"),
			Methods: []string{"/shop.Orders/"},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(limit.Unary), grpc.ChainStreamInterceptor(limit.Stream))
	defer server.Stop()

	for range 3 {
		fmt.Println(status.Code(call(limit, "ann", done)))
	}
	// Output:
	// OK
	// OK
	// ResourceExhausted
}

// A client waits where servers say so, and shares a partner's quota with other processes.
func ExampleClient() {
	partner := ratelimit.TokenBucket{Name: "partner", Rate: 5, Period: time.Second, Capacity: 1}
	client, err := grpclimit.NewClient(&grpclimit.ClientConfig{
		Store: memstore.New(nil), // in production a *pgstore.Store
		Limit: func(context.Context, string, any) ratelimit.Request { return partner.For("") },
	})
	if err != nil {
		log.Fatal(err)
	}
	conn, err := grpc.NewClient("dns:///partner.example.com",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithChainUnaryInterceptor(client.Unary),
		grpc.WithChainStreamInterceptor(client.Stream),
	)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	// Output:
}

// One export of a user at a time, over all processes.
func ExampleInFlightPolicy() {
	store := memstore.New(nil)
	limit, err := grpclimit.New(store, &grpclimit.Config{
		InFlight: []grpclimit.InFlightPolicy{{
			Limit: ratelimit.InFlight{Name: "exports", Limit: 1},
			Key:   grpclimit.ByMetadata("x-user"),
		}},
		Permits: store.Permits(),
	})
	if err != nil {
		log.Fatal(err)
	}
	err = call(limit, "ann", func(ctx context.Context) error {
		permit, _ := grpclimit.PermitOf(ctx, "exports")
		fmt.Println("while", permit.InFlight.Name, "is held:", status.Code(call(limit, "ann", done)))
		return nil
	})
	fmt.Println(status.Code(err), "and then", status.Code(call(limit, "ann", done)))
	// Output:
	// while exports is held: ResourceExhausted
	// OK and then OK
}

// A handler takes in its own transaction what Requests says, and returns a refusal as it is.
func ExampleRequests() {
	store := memstore.New(nil)
	orders := ratelimit.TokenBucket{Name: "orders", Rate: 60, Period: time.Hour, Capacity: 1}
	limit, err := grpclimit.New(store, &grpclimit.Config{
		Policies: []grpclimit.Policy{{Limit: orders, Key: grpclimit.ByMetadata("x-user")}},
		InTx:     func(c *grpclimit.Call) bool { return c.Method == "/shop.Orders/Place" },
	})
	if err != nil {
		log.Fatal(err)
	}
	errNoSuchPiece := errors.New("no such piece")
	place := func(fails error) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			tx, err := store.Begin(ctx)
			if err != nil {
				return err
			}
			defer tx.Rollback(ctx) // gives the tokens back, unless it has committed
			if err := store.TakeTx(ctx, tx, grpclimit.Requests(ctx)...); err != nil {
				return err
			}
			if fails != nil {
				return fails
			}
			return tx.Commit(ctx)
		}
	}
	fmt.Println(status.Code(call(limit, "ann", place(errNoSuchPiece))) == codes.OK)
	for range 2 {
		fmt.Println(status.Code(call(limit, "ann", place(nil))))
	}
	// Output:
	// false
	// OK
	// ResourceExhausted
}
