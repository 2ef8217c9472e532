package grpclimit_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"google.golang.org/grpc"
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
			Applies: grpclimit.Methods("/shop.Orders/"),
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
